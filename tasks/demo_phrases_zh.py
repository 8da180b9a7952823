"""The Chinese half of the demo's language: two pools of phrases that share nothing.

`CORES[intent][pool][form]`: what a message asks for. Form `do` is a verb phrase that is put into
one of `FRAMES[pool]`; form `say` is a sentence of its own. Pool `known` feeds the parts that
models learn from, pool `unseen` feeds the eval and load parts. Both speak of the same intents
and slots in the same trade's words, in other sentences.
"""

from __future__ import annotations

CORES: dict[str, dict[str, dict[str, str]]] = {
    "track_order": {
        "known": {
            "do": """
                查一下{order}到哪了
                查询{order}的物流位置
                看看{order}现在走到哪里
                跟踪一下订单{order}
                告诉我运单{order}的最新位置
                查{order}的运输轨迹
                确认{order}有没有发出
                定位一下{order}这车货
                追一下{order}的位置
                问下{order}的物流走到哪儿
                """,
            "say": """
                {order}到哪儿了？
                我的货{order}现在在什么地方？
                订单{order}怎么还没有物流更新？
                {order}今天能到吗，现在到哪个城市了？
                运单{order}的车走到哪了？
                {order}发车了没有？
                一直看不到{order}的位置信息
                {order}这票货到哪个地方了？
                司机拉着{order}在哪个城市？
                {order}还有多久到？
                {order}物流没动，车在哪里
                """,
        },
        "unseen": {
            "do": """
                看一眼运单{order}目前的位置
                问一下{order}这票货走到哪个地方
                追踪{order}的物流
                """,
            "say": """
                货物{order}运到哪里了呢？
                {order}的轨迹没有更新，车在哪？
                想知道{order}这单现在什么位置
                {order}还要多久，人在哪个城市？
                """,
        },
    },
    "quote_price": {
        "known": {
            "do": """
                报个价，{origin}到{destination}，{weight}
                算一下{origin}到{destination}的运费
                询价，从{origin}发{weight}到{destination}
                给个{origin}至{destination}{vehicle}的价格
                估一下{weight}货从{origin}到{destination}的费用
                问问{vehicle}从{origin}跑{destination}什么价
                报{origin}到{destination}的运价
                核一下{origin}去{destination}的价钱，{weight}
                """,
            "say": """
                {origin}到{destination}运费多少钱？
                从{origin}拉{weight}货去{destination}要多少钱？
                {vehicle}，{origin}到{destination}，什么价格？
                {origin}发{destination}一吨怎么收费？
                {weight}，{origin}到{destination}，给个报价
                你们{origin}到{destination}的价格是多少？
                {origin}到{destination}用{vehicle}贵不贵？
                {vehicle}跑一趟{origin}到{destination}几多钱？
                {origin}送到{destination}，{weight}，什么收费标准？
                {origin}往{destination}怎么报价的？
                """,
        },
        "unseen": {
            "do": """
                核算{weight}从{origin}运到{destination}的价钱
                报一下{origin}往{destination}的运价
                问个价，{vehicle}，{origin}去{destination}
                """,
            "say": """
                {weight}的货，{origin}送{destination}，大概多少费用？
                走{origin}到{destination}这条线怎么报价？
                {origin}至{destination}，{vehicle}一趟几多钱？
                {origin}运{destination}收费标准是多少？
                """,
        },
    },
    "book_truck": {
        "known": {
            "do": """
                订一辆{vehicle}，{time}从{origin}到{destination}
                约一台{vehicle}，{origin}装货，送到{destination}
                安排{vehicle}{time}去{origin}拉货到{destination}
                叫个{vehicle}，{origin}到{destination}
                下单，{origin}到{destination}，{vehicle}，{time}装车
                派一辆{vehicle}到{origin}装货，目的地{destination}
                调一辆{vehicle}，{origin}出发到{destination}
                预约{vehicle}，{time}，{origin}拉到{destination}
                """,
            "say": """
                {time}需要一辆{vehicle}，{origin}到{destination}
                {origin}有货要发{destination}，{time}派{vehicle}来
                要车！{vehicle}，{origin}到{destination}
                {time}{origin}装货，{destination}卸货，{vehicle}一台
                有没有{vehicle}？{origin}去{destination}，{time}用车
                给我们派车，{vehicle}，{origin}发往{destination}
                {origin}这里要发货去{destination}，来台{vehicle}
                缺车，{vehicle}，{origin}送{destination}
                {time}装车，{origin}到{destination}，用{vehicle}
                """,
        },
        "unseen": {
            "do": """
                预订{vehicle}一辆，{origin}到{destination}，{time}用
                调一台{vehicle}来{origin}，货去{destination}
                约车，{time}，{vehicle}，{origin}拉到{destination}
                """,
            "say": """
                {origin}这边{time}装车，发{destination}，来辆{vehicle}
                我司{time}要用{vehicle}，{origin}运往{destination}
                明细：{vehicle}，{origin}出发，{destination}到，请安排车辆
                缺一台{vehicle}，{origin}去{destination}的货等着装
                """,
        },
    },
    "cancel_order": {
        "known": {
            "do": """
                取消订单{order}
                把{order}取消掉
                撤销{order}
                退掉{order}这单
                取消{order}，不用车了
                作废运单{order}
                把{order}撤了
                给{order}办退单
                """,
            "say": """
                {order}不要了，取消吧
                订单{order}不发了
                {order}这单我们不走了，撤单
                计划有变，{order}取消
                {order}不用派车了，货不发了
                客户退货了，{order}别送了
                下错单了，{order}作废
                {order}暂时不发了，撤销吧
                {order}不用送了
                买家不要了，{order}退单
                {order}作废，下错了
                """,
        },
        "unseen": {
            "do": """
                撤掉运单{order}
                将{order}做取消处理
                把{order}这票退了
                """,
            "say": """
                {order}先不发货了，帮忙撤销
                货主不走了，{order}作废吧
                {order}这单下错，不要派车
                不用送了，{order}给我退单
                """,
        },
    },
    "change_address": {
        "known": {
            "do": """
                把{order}的地址改到{destination}
                将{order}改送{destination}
                修改{order}的收货地址为{destination}
                更改订单{order}的目的地，换成{destination}
                把{order}的卸货地换到{destination}
                改一下{order}的地址，改成{destination}
                给{order}换地址，送{destination}
                变更{order}的收货点到{destination}
                """,
            "say": """
                {order}地址写错了，应该是{destination}
                {order}改送到{destination}
                收货地变了，{order}请送{destination}
                订单{order}目的地换成{destination}
                {order}不去原来的地址了，去{destination}
                卸货点有变，{order}改{destination}
                {order}换到{destination}卸货
                仓库换了地方，{order}送去{destination}
                {order}填错地址了，改为{destination}
                """,
        },
        "unseen": {
            "do": """
                把运单{order}的收货点换为{destination}
                给{order}换个目的地，送到{destination}
                变更{order}的地址，新地址{destination}
                """,
            "say": """
                {order}的收货地址填错，要改为{destination}
                仓库搬了，{order}改到{destination}卸货
                {order}别送老地址，送去{destination}
                客户要求{order}换到{destination}收货
                """,
        },
    },
    "change_time": {
        "known": {
            "do": """
                把{order}的时间改到{time}
                将{order}改期到{time}
                推迟{order}到{time}
                把{order}提前到{time}
                调整订单{order}的装货时间为{time}
                重新约{order}的时间，{time}
                把{order}往后推到{time}
                换一下{order}的时间，{time}
                """,
            "say": """
                {order}改{time}装货
                {order}的时间要变，{time}再来
                仓库没空，{order}延到{time}
                {order}装货时间换成{time}
                {order}能改到{time}吗？
                {order}这单晚点，{time}送
                时间有变，{order}定在{time}
                {order}货还没备好，改{time}
                {order}延期到{time}装车
                {order}提前，{time}来装
                """,
        },
        "unseen": {
            "do": """
                变更{order}的装货时间，换到{time}
                给运单{order}改个时间，{time}
                把{order}挪到{time}
                """,
            "say": """
                {order}原来的时间不行，改成{time}
                {order}延期，{time}装车可以吗？
                工厂还没备好货，{order}推到{time}
                {order}我们想提前，{time}来装
                """,
        },
    },
    "report_damage": {
        "known": {
            "do": """
                登记{order}的货损，损失{amount}
                报{order}货物破损，索赔{amount}
                处理{order}的破损，有几箱压坏了
                申请{order}的赔偿，货坏了，{amount}
                记录一下{order}货物受潮损坏
                上报{order}货损{amount}
                给{order}申请理赔，箱子碎了
                """,
            "say": """
                {order}的货摔坏了，要赔{amount}
                {order}箱子破了，货有损坏
                收到{order}发现货物破损
                {order}的货被雨淋湿了，损失{amount}
                {order}到货少了两箱还压坏了
                {order}外包装烂了，里面也碎了
                货损！{order}损失大概{amount}
                卸{order}时看到箱子碎了
                {order}淋湿受潮，怎么赔偿
                拆箱发现{order}全坏了
                {order}货物压碎，估计{amount}
                """,
        },
        "unseen": {
            "do": """
                上报{order}的货物损坏，估计{amount}
                给{order}做破损理赔，{amount}
                登记一下{order}压坏的箱子
                """,
            "say": """
                {order}卸货时发现好几箱碎了
                {order}这批货受潮，赔偿{amount}怎么算
                拆开{order}，货全坏了，损失有{amount}
                {order}包装破损，货物淋湿
                """,
        },
    },
    "payment_invoice": {
        "known": {
            "do": """
                开{order}的发票，金额{amount}
                给{order}开票
                结算{order}的运费{amount}
                核对{order}的账单，{amount}
                付{order}的款，{amount}
                补开{order}的增值税发票
                快递{order}的发票过来
                给{order}打款{amount}
                """,
            "say": """
                {order}的发票什么时候开？
                {order}的运费{amount}还没到账
                {order}的{amount}已经付款，请开票
                {order}账单金额不对，应该是{amount}
                {order}多收了{amount}，对一下账
                {order}什么时候结款？
                {order}的发票没收到
                老板问{order}的发票开了没
                {order}的{amount}什么时候打款？
                {order}账单里的{amount}是什么钱？
                {order}付了{amount}，没给发票
                """,
        },
        "unseen": {
            "do": """
                把{order}的{amount}运费结一下
                寄{order}的发票
                对{order}的账，金额{amount}
                """,
            "say": """
                {order}这单{amount}何时打款？
                {order}已付{amount}，发票还没给
                {order}的账单上{amount}是什么费用？
                财务要{order}的发票
                """,
        },
    },
    "complain": {
        "known": {
            "do": """
                投诉{order}的司机，态度很差
                投诉你们的服务
                反映{order}的服务问题，没人管
                给{order}的司机差评
                投诉客服，一直不回电话
                反映司机态度问题，{order}
                给你们的客服打差评
                """,
            "say": """
                {order}的司机骂人，我要投诉！
                你们服务太差了，没人接电话
                {order}的师傅态度恶劣
                {order}乱加价，司机还不讲理，投诉
                太失望了，客服从来不回复
                等了三天没人处理，什么态度
                对{order}的服务非常不满意
                {order}师傅太恶劣了
                电话打了没人接，非常失望
                {order}的司机不讲道理，骂人
                """,
        },
        "unseen": {
            "do": """
                投诉一下{order}这位师傅的态度
                反映客服没人回复的问题
                给{order}的服务打差评
                """,
            "say": """
                {order}的司机太恶劣，不讲道理
                你们客服态度差得很，非常失望
                打了几次电话都没人管，要投诉
                {order}的服务让人不满意，师傅乱骂人
                """,
        },
    },
    "driver_checkin": {
        "known": {
            "do": """
                打卡，{order}已到{location}
                签到{order}，人在{location}
                报到，{order}车到{location}了
                登记到场，{order}，{location}仓库
                确认到达，{order}在{location}
                登记到场，我在{location}，{order}
                给{order}报到，车进{location}园区
                """,
            "say": """
                {order}已经到{location}，等装货
                到{location}了，{order}打卡
                我到{location}仓库门口了，单号{order}
                {order}到达{location}，排队卸货
                车已到{location}，{order}签到
                {order}，{location}，到场了
                车进{location}园区了，{order}
                抵达{location}，{order}
                {order}在{location}门口排队等装货
                我人在{location}仓库，{order}等卸货
                {location}到场，{order}请确认
                """,
        },
        "unseen": {
            "do": """
                给{order}签到，我在{location}仓库
                给{order}做个到场确认，人在{location}这里
                报一下到场，{order}，{location}
                """,
            "say": """
                人和车都到{location}了，{order}等卸货
                {order}抵达{location}，在门口排队
                {location}仓库已到，请确认{order}签到
                {order}的车已经进{location}场
                """,
        },
    },
    "report_delay": {
        "known": {
            "do": """
                报备{order}晚到{delay}
                登记{order}延误{delay}
                跟客户说{order}要迟到{delay}
                上报堵车，{order}晚{delay}
                报一下{order}延迟{delay}
                记一下{order}要晚点到，{delay}
                通知客户{order}耽误{delay}
                """,
            "say": """
                堵车了，{order}要晚{delay}
                {order}车坏了，晚到{delay}
                高速封路，{order}延误{delay}
                {order}大概迟到{delay}
                下大雨走不快，{order}得晚{delay}
                {order}装货慢，耽误了{delay}
                前面堵死了，{order}要多等{delay}
                大雾，{order}晚点{delay}
                {order}爆胎了，迟{delay}
                {order}赶不到，晚{delay}
                """,
        },
        "unseen": {
            "do": """
                通知收货方{order}延迟{delay}到
                备注{order}晚点{delay}
                上报{order}耽误{delay}
                """,
            "say": """
                路上堵得走不动，{order}迟{delay}
                {order}爆胎在修，估计晚{delay}到
                大雾封高速，{order}耽误{delay}左右
                {order}赶不上了，要延误{delay}
                """,
        },
    },
    "safety_report": {
        "known": {
            "do": """
                报告事故，{location}，{order}追尾了
                上报安全隐患，{location}路段
                报警，{location}这里有车祸，{order}
                上报{order}在{location}刹车失灵
                报告{location}高速路面结冰很危险
                上报{location}路面结冰
                报一下事故，{order}在{location}撞了
                """,
            "say": """
                {order}在{location}出事故了
                {location}这边追尾，{order}停在路边
                {order}刹车有问题，停在{location}，不安全
                {location}附近路面塌了，危险
                {order}在{location}翻车了，人没事
                {location}有车着火，大家小心
                {order}轮胎冒烟，在{location}，危险
                {order}撞车了，位置{location}
                {location}车祸，有人受伤
                {order}刹不住车，刹车失灵，人停{location}了
                {location}路段太危险了
                {order}车头着火，在{location}
                """,
        },
        "unseen": {
            "do": """
                报一个安全事故，{order}，{location}
                上报{location}路面危险
                报告{order}在{location}被追尾
                """,
            "say": """
                {order}在{location}撞车了，人受伤没有
                {location}路段结冰，车祸很多，太危险
                刹车失灵！{order}靠边停在{location}
                {order}车头冒烟着火，位置{location}
                """,
        },
    },
}

FRAMES = {
    "known": """
        帮我{do}
        请{do}
        我想{do}
        麻烦{do}，谢谢
        能不能{do}？
        需要{do}
        请问可以{do}吗？
        {do}
        """,
    "unseen": """
        劳驾{do}
        我这边要{do}
        想让你们{do}
        方便的话{do}吧
        现在{do}，行吗？
        """,
}

OPENERS = {
    "customer": {
        "known": """
            你好，
            您好！
            在吗？
            客服你好，
            喂，
            你好 我是老客户，
            hi，
            早上好，
            我是发货方，
            """,
        "unseen": """
            哈喽，
            亲，
            客服在不在，
            打扰一下，
            晚上好，
            我们是工厂的，
            """,
    },
    "driver": {
        "known": """
            调度，
            师傅这边，
            我是司机老王，
            你好调度，
            平台你好，
            报告调度，
            我是司机小李，
            """,
        "unseen": """
            喂调度吗，
            我是开车的张师傅，
            值班的在吗，
            车队这里，
            """,
    },
}

CLOSERS = {
    "customer": {
        "known": """
            谢谢
            急！
            尽快回复
            比较着急，麻烦快点
            客户一直在催
            辛苦了
            多谢啦~
            等你消息
            """,
        "unseen": """
            拜托了
            在线等
            老板催得紧
            收到回一下哈
            感谢感谢
            """,
    },
    "driver": {
        "known": """
            收到请回复
            谢谢调度
            辛苦
            请记录
            有事打我电话
            """,
        "unseen": """
            看到回个话
            麻烦值班的记下
            我先忙了
            随时联系
            """,
    },
}

FILLERS = {
    "known": """
        我们合作好几年了，
        之前打过一次电话，
        这个事情昨天也说过，
        我现在在外面不方便打字，
        仓库那边一直在问，
        """,
    "unseen": """
        我同事上午联系过你们，
        手机快没电了长话短说，
        这票比较重要，
        领导刚才开会还在讲，
        """,
}

REPLIES = {
    "track_order": "您好，正在为您查询订单{order}的位置。",
    "quote_price": "您好，{origin}到{destination}的报价马上发给您。",
    "book_truck": "您好，已为您预订{origin}到{destination}的{vehicle}。",
    "cancel_order": "您好，订单{order}已为您取消。",
    "change_address": "您好，订单{order}已改送{destination}。",
    "change_time": "您好，订单{order}已改到{time}。",
    "report_damage": "非常抱歉，订单{order}的货损已登记。",
    "payment_invoice": "您好，订单{order}的账款我们会尽快核对。",
    "complain": "非常抱歉，订单{order}的投诉已转交主管。",
    "driver_checkin": "您好，{order}到达{location}已签到。",
    "report_delay": "收到，{order}晚到{delay}已登记，请注意安全。",
    "safety_report": "收到，{location}的情况已上报，请注意安全。",
}

COMPLAINT_WITHOUT_ORDER = "非常抱歉，您的投诉已转交主管。"

MIXED_SCRIPT = {
    "订单": "order",
    "取消": "cancel",
    "发票": "invoice",
    "地址": "address",
    "投诉": "complain",
    "报价": "quote",
    "司机": "driver",
    "客服": "CS",
    "装货": "loading",
}

TYPOS = {
    "的": "得",
    "在": "再",
    "账": "帐",
    "到哪": "道哪",
    "已经": "以经",
    "取消": "取销",
    "地址": "地止",
    "投诉": "投拆",
    "损坏": "损环",
    "装货": "装祸",
    "报价": "抱价",
    "吗": "嘛",
}

CITIES = """
    上海 北京 广州 深圳 杭州 南京 武汉 成都 重庆 西安 天津 苏州
    郑州 长沙 青岛 宁波 厦门 合肥 济南 昆明 沈阳 大连 福州 南昌
    """

VEHICLES = ["4.2米厢货", "6.8米平板", "9.6米高栏", "13米挂车", "冷藏车", "面包车"]

DAYS = ["今天", "明天", "后天", "周一", "周三", "周五", "周六"]

HOURS = ["上午8点", "上午9点", "上午11点", "下午2点", "下午3点", "下午5点", "晚上7点", "晚上9点"]
