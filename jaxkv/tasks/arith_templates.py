"""Templates of the arith task, as data. All wording is our own; `arith` reads them.

In `draws`, `a=2..9` draws a number, `p=10|25` picks one, and `s=a+b` derives one; results are constructed so that each
is a whole number, and at least 2 where a singular would not fit. In texts, `{a}` is a number, `{a thing}` a number and
its noun in the right form, `{P}` and `{Q}` are people, `{he}`, `{He}` and `{his}` belong to `{P}`, another `{slot}` is
a word of `SLOTS`, with an `s` its plural, and `<x|y>` picks a wording. Words are separated by spaces.
"""

WOMEN = (
    "Ada Bea Carla Dina Elif Freya Gita Hana Ines Jana Kira Lena Mina Nora Oona Petra Rosa Sofia Tilda Vera Wanda Yara "
    "Zoe Amina"
)
MEN = (
    "Adam Boris Carlo Dario Emil Felix Goran Hugo Ivan Jonas Karim Leo Marek Nils Otto Pavel Rafi Samir Tomas Viktor "
    "Walt Yusuf Zeno Anton"
)

SLOTS = {
    "thing": "pencil marble sticker bead stamp button shell card coin postcard badge magnet ribbon pebble",
    "other": "eraser whistle key candle feather notebook crayon sponge spool clip",
    "food": "apple pear plum muffin roll cookie walnut fig lemon pancake dumpling carrot",
    "fare": "sandwich juice salad soup waffle pretzel cake bagel",
    "holder": "box bag jar basket tin drawer case crate",
    "tool": "lamp chair kettle clock scarf backpack drum kite tent blanket radio jacket",
    "colour": "red blue green yellow white",
    "shade": "black purple brown silver pink",
    "shop": "bakery market museum library theater garage nursery kiosk",
    "weekday": "Monday Tuesday Wednesday Thursday",
    "later": "Friday Saturday Sunday",
    "group": "class club choir team troop",
    "town": "Alder Birkby Corvale Dunmere Eastham Farrow Glenby Holt",
    "vehicle": "car van truck train bus",
    "craft": "mug bracelet poster puppet candle basket birdhouse",
    "kin": "brother sister cousin neighbor friend aunt",
}

IRREGULAR = {"child": "children", "person": "people", "shelf": "shelves", "foot": "feet", "loaf": "loaves"}

# name, skill, draws, question, steps
TEMPLATES: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("two_holders", "sum", "a=12..2400 b=12..2400 s=a+b",
     "{P} <keeps|has> {a thing} in one {holder} and {b thing} in another. How many {things} does {he} have "
     "<in all|altogether>?",
     ("{P} has {a}+{b}={s thing}.",)),
    ("three_days", "sum", "a=15..900 b=15..900 c=15..900 s=a+b t=s+c",
     "The {shop} in {town} had {a visitor} on {weekday}, {b visitor} on {later} and {c visitor} on a holiday. "
     "How many visitors came on these three days?",
     ("On the first two days there were {a}+{b}={s visitor}.", "With the holiday that makes {s}+{c}={t visitor}.")),
    ("gift", "difference", "a=20..3000 b=3..a r=a-b",
     "{P} <collected|gathered> {a thing} and <gave|handed> {b} of them to {his} {kin}. How many {things} does {he} "
     "still have?",
     ("{P} still has {a}-{b}={r thing}.",)),
    ("gift_twice", "difference", "r=2..400 b=2..300 c=2..300 m=r+c a=m+b",
     "A {holder} holds {a thing}. {P} takes out {b} in the morning and {c} in the evening. How many {things} stay in "
     "the {holder}?",
     ("After the morning {a}-{b}={m thing} stay.", "After the evening {m}-{c}={r thing} stay.")),
    ("before", "difference", "a=2..600 b=2..600 r=b+a",
     "After {P} lost {a thing}, {he} <counted|was left with> {b}. How many {things} did {he} have before?",
     ("{P} had {b}+{a}={r thing}.",)),
    ("how_many_more", "comparison", "b=5..1900 r=2..900 a=b+r",
     "{P} scored {a point} in a game and {Q} scored {b}. How many more points did {P} score?",
     ("{P} scored {a}-{b}={r} more than {Q}.",)),
    ("fewer_total", "comparison", "q=2..700 b=2..300 a=q+b s=a+q",
     "{P} planted {a tulip}. {Q} planted {b} fewer. How many tulips did the two of them plant together?",
     ("{Q} planted {a}-{b}={q tulip}.", "Together they planted {a}+{q}={s tulip}.")),
    ("more_total", "comparison", "a=4..900 b=2..400 q=a+b s=a+q",
     "{P} read {a page} <last week|on vacation>. {Q} read {b page} more than {P}. How many pages did they read in all?",
     ("{Q} read {a}+{b}={q page}.", "In all they read {a}+{q}={s page}.")),
    ("times_as_many", "comparison", "a=3..240 n=3..9 r=a*n",
     "{P} owns {a thing}. {Q} owns {n} times as many. How many {things} does {Q} own?",
     ("{Q} owns {a}*{n}={r thing}.",)),
    ("times_total", "comparison", "a=3..320 n=2..9 q=a*n s=a+q",
     "There were {a frog} at a pond and {n} times as many ducks. How many animals were at the pond?",
     ("There were {a}*{n}={q duck}.", "With the frogs there were {a}+{q}={s animal}.")),
    ("times_more", "comparison", "a=3..80 n=2..6 b=2..40 m=a*n q=m+b",
     "The old bridge in {town} is {a} meters long. The new bridge is {b} meters longer than {n} times the old one. How "
     "many meters long is the new bridge?",
     ("{n} times the old bridge is {n}*{a}={m meter}.", "The new bridge is {m}+{b}={q meter} long.")),
    ("rows", "product", "a=4..60 b=6..45 r=a*b",
     "A <hall|tent|cinema> has {a row} of {b seat} each. How many people can sit there?",
     ("There are {a}*{b}={r seat}.",)),
    ("packs_and_loose", "product", "n=3..40 k=4..30 e=2..90 m=n*k s=m+e",
     "{P} has {n} {holders} with {k thing} in each, and {e} loose {things}. How many {things} is that?",
     ("The {holders} hold {n}*{k}={m thing}.", "With the loose ones {P} has {m}+{e}={s thing}.")),
    ("two_products", "product", "n=2..25 k=3..12 m=2..25 j=3..12 x=n*k y=m*j s=x+y",
     "A gardener plants {n} beds with {k rose} each and {m} beds with {j lily} each. How many flowers are planted?",
     ("There are {n}*{k}={x rose}.", "There are {m}*{j}={y lily}.", "That makes {x}+{y}={s flower}.")),
    ("share", "share", "n=3..12 q=3..160 t=n*q",
     "{t food} are shared equally among {n child}. How many does each child get?",
     ("Each child gets {t}/{n}={q food}.",)),
    ("share_rest", "share", "n=3..9 q=3..90 b=2..80 m=n*q a=m+b",
     "{P} <bakes|makes> {a cookie}, sets {b} aside and packs the rest evenly into {n} {holders}. How many cookies go "
     "into each {holder}?",
     ("To pack there are {a}-{b}={m cookie}.", "Each {holder} gets {m}/{n}={q cookie}.")),
    ("share_sum", "share", "n=3..8 q=4..90 a=2..n*q-2 t=n*q b=t-a",
     "{P} brings {a chestnut} and {Q} brings {b}. They put them together and deal them out evenly to {n person}. How "
     "many chestnuts does each person get?",
     ("Together there are {a}+{b}={t chestnut}.", "Each person gets {t}/{n}={q chestnut}.")),
    ("left_over", "share", "n=4..30 k=5..25 r=2..k-1 m=n*k t=m+r",
     "{P} puts {t thing} into bundles of {k} and makes {n bundle}, as many as possible. How many {things} are left "
     "over?",
     ("The bundles hold {n}*{k}={m thing}.", "Left over are {t}-{m}={r thing}.")),
    ("pages", "rate", "a=6..120 d=3..30 r=a*d",
     "{P} reads {a page} every evening. How many pages does {he} read in {d} evenings?",
     ("{P} reads {a}*{d}={r page}.",)),
    ("journey", "rate", "v=40..95 h=2..9 e=5..80 m=v*h s=m+e",
     "A {vehicle} <drives|travels> at {v} kilometers an hour for {h} hours and then goes another {e} kilometers to "
     "{town}. How many kilometers is the whole trip?",
     ("In {h} hours it goes {v}*{h}={m kilometer}.", "The whole trip is {m}+{e}={s kilometer}.")),
    ("filling", "rate", "k=3..25 h=3..60 t=k*h",
     "A pump moves {k liter} of water a minute. How many minutes does it need for a pool of {t} liters?",
     ("It needs {t}/{k}={h minute}.",)),
    ("two_machines", "rate", "a=4..60 b=4..60 h=3..12 s=a+b r=s*h",
     "One machine folds {a shirt} an hour and a second one folds {b}. How many shirts do the two fold in {h} hours?",
     ("In one hour they fold {a}+{b}={s shirt}.", "In {h} hours they fold {s}*{h}={r shirt}.")),
    ("two_speeds", "rate", "a=5..40 m=2..9 b=5..40 n=2..9 x=a*m y=b*n s=x+y",
     "{P} paints {a tile} an hour. After {m} hours {he} changes the brush and paints {b tile} an hour for {n} more "
     "hours. How many tiles does {he} paint in total?",
     ("First {P} paints {a}*{m}={x tile}.", "Then {he} paints {b}*{n}={y tile}.", "In total that is "
      "{x}+{y}={s tile}.")),
    ("unit_rate", "rate", "k=2..9 u=3..40 n=2..30 t=k*u r=n*u",
     "It takes {t gram} of wool to knit {k} equal hats. How many grams of wool do {n} such hats take?",
     ("One hat takes {t}/{k}={u gram}.", "For {n hat} that is {n}*{u}={r gram}.")),
    ("discount", "percent", "k=2..150 p=10|15|20|25|30|40|60 t=20*k d=k*p/5 r=t-d",
     "A {tool} costs ${t}. In a sale it is {p}% cheaper. How many dollars does the {tool} cost in the sale?",
     ("The price falls by {t}*{p}/100={d dollar}.", "It now costs {t}-{d}={r dollar}.")),
    ("percent_group", "percent", "k=2..48 p=5|10|15|20|25|30|35|40|45|55|60|65|70|75|80 t=20*k r=k*p/5",
     "Of the {t} pupils at a school in {town}, {p}% walk to school. How many pupils walk?",
     ("{t}*{p}/100={r pupil} walk to school.",)),
    ("percent_rest", "percent", "k=2..120 p=10|20|25|30|40|45|60|65|70|80 t=20*k d=k*p/5 r=t-d",
     "A farmer <picks|harvests> {t melon} and sells {p}% of them. How many melons are not sold?",
     ("The farmer sells {t}*{p}/100={d melon}.", "Not sold are {t}-{d}={r melon}.")),
    ("percent_growth", "percent", "k=2..180 p=5|10|15|20|25|35|40|50 t=20*k d=k*p/5 r=t+d",
     "Last year {t} people came to the <fair|parade> in {town}. This year {p}% more came. How many people came this "
     "year?",
     ("{t}*{p}/100={d} more people came.", "This year {t}+{d}={r person} came.")),
    ("tip", "percent", "k=1..30 p=5|10|15|20|25 j=1..20 t=20*k x=20*j b=t+x d=(k+j)*p/5 r=b+d",
     "A meal costs ${t} and the drinks cost ${x}. {P} adds a tip of {p}% to the bill. How many dollars does {he} pay?",
     ("The bill is {t}+{x}={b dollar}.", "The tip is {b}*{p}/100={d dollar}.", "{P} pays {b}+{d}={r dollar}.")),
    ("unit_fraction", "fraction", "n=3|4|5|6|7|8|9|10 q=2..300 t=n*q r=t-q",
     "There are {t} children at a camp. 1/{n} of them can swim. How many children cannot swim?",
     ("{t}/{n}={q child} can swim.", "{t}-{q}={r child} cannot swim.")),
    ("fraction", "fraction", "n=3|4|5|7|8|9 m=2..n-1 q=3..60 t=n*q r=m*q",
     "A {group} has saved ${t} and spends {m}/{n} of it on a trip. How many dollars does the trip cost?",
     ("1/{n} of the money is {t}/{n}={q dollar}.", "The trip costs {m}*{q}={r dollar}.")),
    ("half_then", "fraction", "r=2..200 n=3..8 m=r*n t=2*m",
     "{P} has {t thing}. Half of them go to {Q}, and the other half is split evenly among {n kid}. How many {things} "
     "does each kid get?",
     ("The half is {t}/2={m thing}.", "Each kid gets {m}/{n}={r thing}.")),
    ("fraction_two", "fraction", "n=3..7 m=3..7 q=n*m k=2..40 t=q*k x=m*k y=n*k s=x+y r=t-s",
     "A library owns {t map}. 1/{n} of them show mountains and 1/{m} show seas. The rest show towns. How many maps "
     "show towns?",
     ("{t}/{n}={x map} show mountains.", "{t}/{m}={y map} show seas.", "These are {x}+{y}={s map}.",
      "Towns are on {t}-{s}={r map}.")),
    ("change", "money", "n=2..9 p=2..12 e=1..60 c=n*p b=c+e",
     "{P} buys {n food} at ${p} each and pays with ${b}. How many dollars does {he} get back?",
     ("The {foods} cost {n}*{p}={c dollar}.", "{P} gets back {b}-{c}={e dollar}.")),
    ("change_two", "money", "n=2..9 p=2..15 m=2..9 q=2..15 x=n*p y=m*q s=x+y r=2..90 b=s+r",
     "At the kiosk one {food} costs ${p} and one {fare} costs ${q}. {P} takes {n food} and {m fare} and had ${b} in "
     "{his} purse. How many dollars are left in the purse?",
     ("The {foods} cost {n}*{p}={x dollar}.", "The {fares} cost {m}*{q}={y dollar}.", "Both cost {x}+{y}={s dollar}.",
      "Left are {b}-{s}={r dollar}.")),
    ("saving", "money", "w=3..20 k=4..60 a=5..300 m=w*k s=a+m",
     "{P} has ${a} and <saves|puts aside> ${k} every week. How many dollars does {he} have after {w} weeks?",
     ("In {w} weeks {P} saves {w}*{k}={m dollar}.", "Then {he} has {a}+{m}={s dollar}.")),
    ("saving_goal", "money", "w=2..15 k=3..40 a=5..300 m=w*k t=a+m",
     "A {tool} costs ${t}. {P} already has ${a} and saves ${k} a week. After how many weeks can {he} buy it?",
     ("{P} still needs {t}-{a}={m dollar}.", "That takes {m}/{k}={w week}.")),
    ("wage", "money", "h=4..40 p=8..35 b=10..200 m=h*p s=m+b",
     "{P} works {h} hours for ${p} an hour and gets ${b} extra for <working at night|a heavy load>. How many dollars "
     "does {he} earn?",
     ("The hours bring {h}*{p}={m dollar}.", "With the extra {P} earns {m}+{b}={s dollar}.")),
    ("profit", "money", "n=3..40 c=2..14 g=2..15 p=c+g x=n*c y=n*p r=y-x",
     "{P} makes {n craft}. The material for one costs ${c}, and {he} sells each for ${p}. How many dollars does {he} "
     "gain when all are sold?",
     ("The material costs {n}*{c}={x dollar}.", "The sale brings {n}*{p}={y dollar}.", "{P} gains "
      "{y}-{x}={r dollar}.")),
    ("distractor_age", "distractor", "z=7..60 a=8..700 b=2..500 s=a+b",
     "{P} is {z} years old and has {a thing}. {His} {kin} sends {b} more. How many {things} does {P} have now?",
     ("{P} now has {a}+{b}={s thing}.",)),
    ("distractor_price", "distractor", "n=3..30 k=4..24 z=2..30 b=2..10 m=n*k r=m-b",
     "A shop gets {n} {holders} of cups, {k} cups in each. A {holder} costs ${z}. {b} cups arrive broken. How many "
     "cups are whole?",
     ("{n}*{k}={m cup} arrive.", "{m}-{b}={r cup} are whole.")),
    ("distractor_colour", "distractor", "r=2..600 b=2..400 z=5..400 a=r+b",
     "{P} has {a} {colour} {things} and {z} {shade} {things}. {He} trades away {b} of the {colour} ones. How many "
     "{colour} {things} are left?",
     ("Left are {a}-{b}={r} {colour} {things}.",)),
    ("distractor_other", "distractor", "a=6..90 z=3..90 n=3..9 b=2..50 m=a*n s=m+b",
     "On a table lie {z other} and {a thing}. {Q} owns {n} times as many {things} as lie there, and {P} "
     "sends {Q} {b} more. How many {things} does {Q} have then?",
     ("{Q} owns {a}*{n}={m thing}.", "With those from {P} that makes {m}+{b}={s thing}.")),
    ("hours_minutes", "units", "h=2..95 b=5..55 m=h*60 s=m+b",
     "A <voyage|relay|train ride> lasts {h} hours and {b} minutes. How many minutes is that?",
     ("{h} hours are {h}*60={m minute}.", "In all it lasts {m}+{b}={s minute}.")),
    ("rope", "units", "k=2|4|5|10|20|25|50 b=2..240 c=b*100 n=c/k",
     "A rope is {b} meters long. {P} cuts it into pieces of {k} centimeters. How many pieces does {he} get?",
     ("The rope is {b}*100={c centimeter} long.", "{P} gets {c}/{k}={n piece}.")),
    ("flour", "units", "w=2..9 n=2..15 k=20..120 g=w*1000 u=n*k r=g-u",
     "A sack holds {w} kilograms of flour. A cook uses {k} grams for each of {n loaf}. How many grams of flour are "
     "left in the sack?",
     ("The sack holds {w}*1000={g gram}.", "The loaves take {n}*{k}={u gram}.", "Left are {g}-{u}={r gram}.")),
    ("dozens", "units", "n=3..60 b=2..30 m=n*12 r=m-b",
     "A farm packs {n} dozen eggs, and {b} of the eggs crack. How many eggs stay whole?",
     ("{n} dozen are {n}*12={m egg}.", "{m}-{b}={r egg} stay whole.")),
    ("weeks", "units", "w=2..30 k=2..60 d=w*7 r=d*k",
     "A <horse|donkey|goat> eats {k carrot} every day. How many carrots does it eat in {w} weeks?",
     ("{w} weeks are {w}*7={d day}.", "It eats {d}*{k}={r carrot}.")),
    ("bus_seats", "capacity", "r=2..20 a=12..50 b=3..25 s=a+b t=s+r",
     "A bus to {town} has {t seat}. {a} people are sitting in it when {b} more get on and sit down. How many seats are "
     "still free?",
     ("{a}+{b}={s person} are sitting.", "{t}-{s}={r seat} are free.")),
    ("tank", "capacity", "k=3..30 h=3..20 a=10..500 f=k*h s=a+f r=0..600 t=s+r",
     "A tank <takes|holds at most> {t} liters and has {a} liters in it. For {h} minutes {k liter} a minute flow in. "
     "How many more liters would fit after that?",
     ("{h}*{k}={f liter} flow in.", "Then the tank has {a}+{f}={s liter}.", "{t}-{s}={r} more would fit.")),
    ("shelves", "capacity", "n=3..20 k=8..45 a=5..n*k-1 t=n*k r=t-a",
     "A bookcase has {n shelf}, and each takes {k book}. {P} has put {a book} on them. For how many more books is "
     "there room?",
     ("The bookcase takes {n}*{k}={t book}.", "There is room for {t}-{a}={r} more.")),
    ("clock", "time", "g=6..14 i=10..59 d=2..8 h=g+d j=10..59 x=g*60 u=x+i y=h*60 v=y+j r=v-u",
     "A ferry leaves {town} at {g}:{i} and lands at {h}:{j} on the same day. How many minutes is it on the way?",
     ("{g} hours are {g}*60={x minute}.", "It leaves {x}+{i}={u} minutes after midnight.",
      "{h} hours are {h}*60={y minute}.", "It lands {y}+{j}={v} minutes after midnight.",
      "It is on the way for {v}-{u}={r minute}.")),
    ("schedule", "time", "h=2..5 a=10..45 b=10..45 t=h*60 s=a+b r=t-s",
     "{P} has {h} hours before {his} bus leaves. {He} needs {a} minutes to pack and {b} minutes to get to the "
     "stop. How many minutes are left over?",
     ("{h} hours are {h}*60={t minute}.", "{P} needs {a}+{b}={s minute}.", "Left over are {t}-{s}={r minute}.")),
    ("ages", "time", "q=4..40 b=2..30 y=2..25 a=q+b s=a+y",
     "{Q} is {q} years old. {P} is {b} years older. How old will {P} be in {y} years?",
     ("{P} is {q}+{b}={a} years old.", "In {y} years {P} will be {a}+{y}={s}.")),
    ("fence", "geometry", "a=6..400 b=4..300 s=a+b r=2*s",
     "A field is {a} meters long and {b} meters wide. How many meters of fence go around it?",
     ("Length and width are {a}+{b}={s meter}.", "The fence is 2*{s}={r meter} long.")),
    ("tiles", "geometry", "a=4..30 b=3..25 z=2..60 m=a*b r=m+z",
     "A floor needs {a} rows of {b tile}. {P} orders {z tile} too many on purpose. How many tiles does {he} order?",
     ("The floor needs {a}*{b}={m tile}.", "{P} orders {m}+{z}={r tile}.")),
    ("stops", "three steps", "y=2..40 b=2..25 c=2..25 e=2..y a=y+c z=y+b w=z-e",
     "A tram sets out with {a person}. At the first stop {c} get off, at the second {b} get on, and at the third {e} "
     "get off. How many people are in the tram then?",
     ("After the first stop there are {a}-{c}={y person}.", "After the second there are {y}+{b}={z person}.",
      "After the third there are {z}-{e}={w person}.")),
    ("average", "three steps", "m=5..120 a=2..m-1 b=2..m-1 x=a+b t=3*m c=t-x",
     "{P} jumps rope {a} times on {weekday}, {b} times on {later} and {c} times on the day after. What is {his} "
     "average per day?",
     ("On the first two days there are {a}+{b}={x jump}.", "On all three there are {x}+{c}={t jump}.",
      "The average is {t}/3={m}.")),
    ("bakery_day", "three steps", "n=3..20 k=6..36 b=2..k p=2..9 m=n*k s=m-b r=s*p",
     "A bakery puts {n} trays of {k bun} in the oven. On one tray {b} buns burn, and all others sell for ${p} each. "
     "How many dollars do they bring?",
     ("There are {n}*{k}={m bun}.", "Not burnt are {m}-{b}={s bun}.", "They bring {s}*{p}={r dollar}.")),
    ("teams", "three steps", "k=4..11 n=2..20 g=n*k a=2..g-2 b=g-a p=5..40 r=n*p",
     "{a} girls and {b} boys form teams of {k}. Every team pays ${p} to enter. How many dollars do the teams pay in "
     "all?",
     ("There are {a}+{b}={g child}.", "They form {g}/{k}={n team}.", "The teams pay {n}*{p}={r dollar}.")),
    ("halving", "three steps", "r=2..90 b=2..60 x=r*2 y=x+b z=y*2",
     "{P} has {z dollar}. {He} spends half of them on a {tool}, then ${b} on lunch, and then half of what is left on a "
     "ticket. How many dollars remain?",
     ("The {tool} leaves {z}/2={y dollar}.", "Lunch leaves {y}-{b}={x dollar}.", "The ticket leaves "
      "{x}/2={r dollar}.")),
    ("triple", "three steps", "a=4..90 n=2..6 b=2..60 q=a*n w=q+b x=a+q s=x+w",
     "{P} has {a thing}. {Q} has {n} times as many, and {P}'s {kin} has {b} more than {Q}. How many {things} do the "
     "three have together?",
     ("{Q} has {a}*{n}={q thing}.", "The {kin} has {q}+{b}={w thing}.", "{P} and {Q} have {a}+{q}={x thing}.",
      "The three have {x}+{w}={s thing}.")),
)  # fmt: skip
