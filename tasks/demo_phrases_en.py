"""The English half of the demo's language; same shape as `demo_phrases_zh`."""

from __future__ import annotations

CORES: dict[str, dict[str, dict[str, str]]] = {
    "track_order": {
        "known": {
            "do": """
                track order {order}
                check where {order} is
                find the location of {order}
                see the latest position of shipment {order}
                get a tracking update for {order}
                locate my freight {order}
                know if {order} has left the warehouse
                look up where {order} has got to
                follow {order} on the map
                """,
            "say": """
                where is {order} now?
                where's my shipment {order}?
                tracking for {order} has not moved
                has {order} been shipped yet?
                any update on the status of {order}?
                which city is {order} in right now?
                I can't see where {order} is on the map
                what is the position of {order}?
                has {order} left yet?
                {order} has no tracking update
                which place has {order} reached?
                """,
        },
        "unseen": {
            "do": """
                look up the position of {order}
                follow shipment {order}
                check the current status and location of {order}
                """,
            "say": """
                what's the whereabouts of {order}, which city?
                {order} shows no tracking update at all
                my freight {order}, where has it got to?
                has the load {order} left yet? where is it?
                """,
        },
    },
    "quote_price": {
        "known": {
            "do": """
                get a quote from {origin} to {destination} for {weight}
                know the price for {weight} from {origin} to {destination}
                get the rate for a {vehicle}, {origin} to {destination}
                see a freight estimate {origin} to {destination}
                ask what you charge for {weight}, {origin} to {destination}
                compare the cost of {origin} to {destination} by {vehicle}
                find out what {origin} to {destination} costs
                request a price for {weight}, {origin} to {destination}
                """,
            "say": """
                how much is it from {origin} to {destination}?
                what does a {vehicle} from {origin} to {destination} cost?
                price for {weight}, {origin} to {destination}?
                what's your rate between {origin} and {destination}?
                quote: {weight}, {origin} to {destination}
                is it expensive to ship {weight} from {origin} to {destination}?
                which price applies to a {vehicle}, {origin} to {destination}?
                total money for {weight}, {origin} to {destination}?
                what would a {vehicle} cost, {origin} into {destination}?
                """,
        },
        "unseen": {
            "do": """
                have a price quote on {weight} going {origin} to {destination}
                find out the cost for {origin} to {destination}
                request your rates, {vehicle}, {origin} to {destination}
                """,
            "say": """
                what would you charge for {weight} out of {origin} into {destination}?
                how much money to ship from {origin} to {destination}?
                {origin} to {destination} with a {vehicle}, what price?
                give me an estimate of cost, {weight}, {origin} to {destination}
                """,
        },
    },
    "book_truck": {
        "known": {
            "do": """
                book a {vehicle} from {origin} to {destination} {time}
                order a {vehicle}, pickup {origin}, drop {destination}
                reserve a {vehicle} for {time}, {origin} to {destination}
                arrange a {vehicle} {time} in {origin}, going to {destination}
                schedule a pickup in {origin} with a {vehicle} to {destination}
                hire a {vehicle} {origin} to {destination}
                get a {vehicle} dispatched from {origin} to {destination}
                place a booking, {vehicle}, {origin} going to {destination}
                """,
            "say": """
                we need a {vehicle} {time}, {origin} to {destination}
                send a {vehicle} to {origin} {time}, cargo goes to {destination}
                truck needed: {vehicle}, {origin} to {destination}
                new booking: {vehicle}, {origin} to {destination}, {time}
                do you have a {vehicle} free {time}? {origin} to {destination}
                cargo is ready in {origin} for {destination}, send a {vehicle}
                dispatch a {vehicle}, loading in {origin}, unloading in {destination}
                looking for a {vehicle}, {origin} to {destination}, {time}
                our factory has goods for {destination}, {vehicle} to {origin}
                goods waiting in {origin}, {vehicle} wanted to {destination}
                """,
        },
        "unseen": {
            "do": """
                make a booking: {vehicle} {time}, {origin} to {destination}
                get a {vehicle} arranged, loading {origin}, unloading {destination}
                reserve one {vehicle}, {origin} going {destination}
                """,
            "say": """
                please dispatch one {vehicle} {time}, from {origin} over to {destination}
                goods are waiting in {origin}, need a {vehicle} to {destination}
                I'm looking for a {vehicle} {time}, pickup {origin} and deliver {destination}
                our factory in {origin} wants a {vehicle} for {destination}
                """,
        },
    },
    "cancel_order": {
        "known": {
            "do": """
                cancel order {order}
                cancel {order}
                call off {order}
                withdraw booking {order}
                stop {order}, we don't need it
                void shipment {order}
                drop {order} from the plan
                get {order} cancelled
                """,
            "say": """
                {order} is no longer needed
                we don't want {order} anymore, cancel it
                cancel {order}, plans changed
                {order} was booked by mistake
                please scrap {order}, the buyer returned the goods
                no truck needed for {order} any more
                do not ship {order}
                forget about {order}
                {order} is not needed now
                no need for {order}, plans are off
                wrong booking, drop {order}
                """,
        },
        "unseen": {
            "do": """
                have {order} cancelled
                void booking {order}
                drop {order}, not needed now
                """,
            "say": """
                we won't ship {order} after all, call it off
                {order} should be cancelled, wrong booking
                forget {order}, the buyer doesn't want it
                my plans changed so no need for {order}
                """,
        },
    },
    "change_address": {
        "known": {
            "do": """
                change the address of {order} to {destination}
                send {order} to {destination} instead
                update the delivery address for {order} to {destination}
                redirect {order} to {destination}
                move the drop point of {order} to {destination}
                correct the destination on {order} to {destination}
                reroute {order}, deliver at {destination}
                switch {order} to a new address, {destination}
                """,
            "say": """
                wrong address on {order}, it should be {destination}
                {order} must go to {destination} now
                new delivery address for {order}: {destination}
                deliver {order} to {destination} not the old address
                the consignee moved, {order} goes to {destination}
                can {order} be delivered in {destination} instead?
                our warehouse moved, send {order} to {destination}
                {order} should be delivered in {destination}
                change of address on {order}, now {destination}
                """,
        },
        "unseen": {
            "do": """
                reroute {order} to a new address in {destination}
                switch the destination of {order} over to {destination}
                have {order} delivered at {destination} instead
                """,
            "say": """
                the address for {order} is wrong, correct one is {destination}
                {order}: change of destination, {destination}
                our warehouse moved so {order} should go to {destination}
                don't deliver {order} to the old place, use {destination}
                """,
        },
    },
    "change_time": {
        "known": {
            "do": """
                reschedule {order} to {time}
                change the pickup time of {order} to {time}
                postpone {order} until {time}
                move {order} to {time}
                bring {order} forward to {time}
                shift the loading slot of {order} to {time}
                push the pickup for {order} to {time}
                set a new pickup for {order}, {time}
                """,
            "say": """
                can {order} be picked up {time} instead?
                {order} has to be later, {time}
                new time for {order}: {time}
                the dock is full, do {order} {time}
                {order} should load {time}
                we are not ready, make {order} {time}
                {order} earlier, {time} is better
                is {time} ok for {order}?
                goods not ready, {order} on {time}
                """,
        },
        "unseen": {
            "do": """
                push {order} back to {time}
                get a new pickup time for {order}, {time}
                set the schedule of {order} to {time}
                """,
            "say": """
                the old time doesn't work for {order}, {time} is better
                {order} earlier please, {time}
                is it ok to load {order} {time} instead?
                goods are not ready, postpone {order}, {time}
                """,
        },
    },
    "report_damage": {
        "known": {
            "do": """
                report damage on {order}, loss {amount}
                file a damage claim for {order}, {amount}
                report broken boxes in {order}
                claim {amount} for damaged goods on {order}
                register that cargo in {order} is wet
                note broken pallets on {order}
                submit a damage claim on {order}
                """,
            "say": """
                goods in {order} arrived broken
                {order} came damaged, we lost {amount}
                boxes of {order} are crushed
                the cargo of {order} got wet, claim {amount}
                two pallets on {order} are smashed, about {amount}
                we opened {order} and the items are broken
                packaging on {order} is torn and goods are damaged
                half of {order} is smashed
                everything on {order} broke
                {order} was torn and wet inside
                pallets crushed on {order}, {amount} loss
                """,
        },
        "unseen": {
            "do": """
                submit a claim of {amount}, {order} has damaged cargo
                note the crushed pallets on {order}
                report that {order} arrived wet and broken
                """,
            "say": """
                everything inside {order} is smashed
                {order} has damage worth {amount}
                half of the boxes in {order} were torn and wet
                the goods on {order} broke, {amount} loss
                """,
        },
    },
    "payment_invoice": {
        "known": {
            "do": """
                get the invoice for {order}
                pay {amount} for {order}
                receive the invoice of {amount} for {order}
                check the bill for {order}, {amount}
                settle {order}, {amount}
                ask about the payment for {order}
                have the invoice of {order} sent
                clear the bill on {order}, {amount}
                """,
            "say": """
                where is the invoice for {order}?
                payment of {amount} for {order} has not arrived
                we paid {amount} for {order}, send the receipt
                the bill for {order} is wrong, it should be {amount}
                you charged {amount} too much on {order}
                when will {order} be paid?
                no invoice received for {order}
                accounting wants the invoice of {order}
                {order} is not paid yet, {amount}
                why does the invoice of {order} say {amount}?
                please issue an invoice on {order}
                """,
        },
        "unseen": {
            "do": """
                have an invoice issued on {order}
                clear the {amount} payment of {order}
                review the bill of {amount} on {order}
                """,
            "say": """
                accounting is asking for the invoice of {order}
                {amount} for {order} is still not paid
                the invoice on {order} says {amount}, why?
                I sent {amount} for {order}, where's the receipt?
                """,
        },
    },
    "complain": {
        "known": {
            "do": """
                complain about the driver of {order}
                make a complaint about your service
                complain, nobody answers the phone
                file a complaint, {order} driver was rude
                report bad service on {order}
                lodge a complaint against the driver of {order}
                tell your manager the service is bad
                """,
            "say": """
                the driver of {order} was very rude
                your service is terrible, nobody calls back
                I am very unhappy with {order}
                worst service ever, no one answers
                {order} driver shouted at our staff, unacceptable
                I am disappointed, support ignores me
                terrible driver on {order}
                what an attitude, your support never answers
                {order} was an awful experience
                """,
        },
        "unseen": {
            "do": """
                lodge a complaint on {order}, terrible driver
                complain that support never answers
                tell your boss how rude the {order} driver was
                """,
            "say": """
                terrible experience, nobody answers my calls
                such an unacceptable attitude from the driver on {order}
                very disappointed with your support and service
                {order} was the worst service, I am unhappy
                """,
        },
    },
    "driver_checkin": {
        "known": {
            "do": """
                check in at {location} for {order}
                confirm arrival of {order} at {location}
                report that I am at {location} with {order}
                sign in, {order}, {location} warehouse
                register my arrival in {location}, {order}
                log my arrival at {location}, {order}
                mark {order} arrived in {location}
                """,
            "say": """
                arrived at {location}, load {order}
                I am at the {location} gate with {order}
                {order} here in {location}, waiting to unload
                checking in {order} at {location}
                reached {location} for {order}, in the queue
                {order} on site in {location}
                just got to {location}, {order}
                {order} reached the {location} warehouse
                standing at the {location} gate, {order}
                {order} is here at {location}, waiting in the queue
                """,
        },
        "unseen": {
            "do": """
                mark {order} as arrived, {location}
                check {order} in, I'm at {location}
                log arrival, {location} gate, {order}
                """,
            "say": """
                just got to the {location} warehouse, {order}
                {order} has reached {location}, waiting at the gate
                I'm here in {location} to unload {order}
                standing in the queue at {location}, check in {order}
                """,
        },
    },
    "report_delay": {
        "known": {
            "do": """
                report a delay of {delay} on {order}
                tell the customer {order} is {delay} late
                log that {order} will be late by {delay}
                say {order} is running {delay} behind
                note a {delay} delay for {order}
                warn them {order} is {delay} late
                record {order} as late, {delay}
                """,
            "say": """
                stuck in traffic, {order} will be {delay} late
                {order} delayed {delay}, the road is closed
                flat tire, {order} needs {delay} more
                {order} is running late by {delay}
                heavy rain, {order} about {delay} behind
                loading was slow, {order} is {delay} late
                the engine broke down, {order} late {delay}
                traffic jam, {order} {delay} later
                snow on the road, {order} lost {delay}
                can't make it, {order} late by {delay}
                """,
        },
        "unseen": {
            "do": """
                warn the receiver that {order} comes {delay} late
                record a delay on {order}, {delay}
                let them know {order} is behind by {delay}
                """,
            "say": """
                huge traffic jam, expect {order} {delay} later
                can't make it on time, {order} delayed by {delay}
                road closed by snow, {order} is late, {delay}
                {order} lost {delay} because loading was slow
                """,
        },
    },
    "safety_report": {
        "known": {
            "do": """
                report an accident near {location}, {order}
                report a hazard on the road at {location}
                report brake failure on {order} in {location}
                report a crash at {location}
                flag danger, ice on the highway near {location}
                alert you, {order} crashed at {location}
                raise a safety warning at {location}
                """,
            "say": """
                accident at {location}, {order} hit from behind
                {order} crashed near {location}, nobody hurt
                brakes failing on {order}, stopped at {location}
                dangerous ice on the road near {location}
                there is a fire on the highway at {location}
                {order} rolled over in {location}
                smoke from the wheels of {order} at {location}, not safe
                {order} had an accident in {location}, driver hurt
                big crash on the {location} road
                brakes failed on {order} near {location}
                {order} was hit at {location}
                the truck of {order} caught fire in {location}
                """,
        },
        "unseen": {
            "do": """
                report a safety problem, {order}, {location}
                alert you about a dangerous road near {location}
                report that {order} was hit in {location}
                """,
            "say": """
                {order} had a crash in {location}, one person hurt
                my brakes failed, {order} stopped near {location}
                big accident on the {location} highway, danger
                the truck of {order} is on fire at {location}
                """,
        },
    },
}

FRAMES = {
    "known": """
        please {do}
        I want to {do}
        can you help me {do}?
        I need to {do}
        we have to {do}
        how do I {do}?
        {do}
        """,
    "unseen": """
        I'd like to {do}
        kindly {do}
        would it be possible to {do}?
        trying to {do} here
        """,
}

OPENERS = {
    "customer": {
        "known": """
            hi,
            hello,
            Hi there,
            good morning,
            Hello team,
            excuse me,
            hey,
            this is a regular customer,
            """,
        "unseen": """
            Dear support,
            greetings,
            good evening,
            sorry to bother you,
            quick question:
            """,
    },
    "driver": {
        "known": """
            dispatch,
            hi dispatch,
            driver Li here,
            hello office,
            this is driver Tom,
            hey boss,
            """,
        "unseen": """
            control room,
            driver Wang speaking,
            morning folks,
            to the desk:
            """,
    },
}

CLOSERS = {
    "customer": {
        "known": """
            thanks
            thank you!
            urgent
            asap please
            my customer is waiting
            reply soon
            thx a lot
            """,
        "unseen": """
            cheers
            much appreciated
            my manager keeps asking
            awaiting your answer
            """,
    },
    "driver": {
        "known": """
            over
            thanks dispatch
            call me if needed
            please note
            copy?
            """,
        "unseen": """
            confirm when you read this
            ring me back
            driving now, talk later
            """,
    },
}

FILLERS = {
    "known": """
        we have worked with you for years,
        I already called once,
        I mentioned this yesterday,
        the warehouse keeps asking,
        I am outside and can't type much,
        """,
    "unseen": """
        my colleague spoke with someone earlier,
        phone battery is low so I keep it short,
        this load matters a lot,
        """,
}

REPLIES = {
    "track_order": "Thank you, we are checking where {order} is.",
    "quote_price": "Thank you, the {origin} to {destination} quote is coming.",
    "book_truck": "Thank you, the {vehicle} from {origin} to {destination} is booked.",
    "cancel_order": "Thank you, order {order} is cancelled.",
    "change_address": "Thank you, {order} now goes to {destination}.",
    "change_time": "Thank you, {order} is moved to {time}.",
    "report_damage": "We are sorry, damage on {order} is registered.",
    "payment_invoice": "Thank you, we will check the account of {order}.",
    "complain": "We are sorry, your complaint on {order} went to a manager.",
    "driver_checkin": "Thank you, {order} is checked in at {location}.",
    "report_delay": "Thank you, {order} is {delay} late, drive safely please.",
    "safety_report": "Thank you, {location} is reported, please stay safe.",
}

COMPLAINT_WITHOUT_ORDER = "We are sorry, your complaint went to a manager."

MIXED_SCRIPT = {
    "order": "订单",
    "cancel": "取消",
    "invoice": "发票",
    "driver": "司机",
    "address": "地址",
    "truck": "货车",
    "thanks": "谢谢",
}

ABBREVIATIONS = {
    "please": "pls",
    "you": "u",
    "are": "r",
    "because": "cuz",
    "thank you": "ty",
    "with": "w/",
}

CITIES = """
    Shanghai Beijing Guangzhou Shenzhen Hangzhou Nanjing Wuhan Chengdu Chongqing Tianjin
    Suzhou Zhengzhou Changsha Qingdao Ningbo Xiamen Hefei Jinan Kunming Shenyang Dalian Fuzhou
    """

VEHICLES = ["4.2m box truck", "6.8m flatbed", "9.6m truck", "13m trailer", "reefer", "van"]

DAYS = ["today", "tomorrow", "Monday", "Wednesday", "Friday", "Saturday"]

HOURS = ["at 8am", "at 9am", "at 11am", "at 2pm", "at 3pm", "at 5pm", "at 7pm", "at 9pm"]
