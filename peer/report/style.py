"""The style sheet of the report. Colours are from the Okabe–Ito palette, which colour-blind readers can tell apart."""

STYLE = """
:root{color-scheme:light dark;--paper:#fbfbf9;--panel:#fff;--ink:#1c2329;--dim:#66717b;--rule:#e3e5e2;--faint:#eef0ed;
--worst:#c8500a;--mean:#0068a8;--baseline:#00825f;--bound:#9a5b86;--peer:#8b98a5;--warn:#fff3e2;--warn-ink:#7a3d00;
--run-0:#0068a8;--run-1:#b85c00;--run-2:#00825f;--run-3:#9a4f86;--run-4:#2f8fbd;--run-5:#8a7a00;--run-6:#5c6670;
--run-7:#b3323c}
@media (prefers-color-scheme:dark){:root{--paper:#14181b;--panel:#1b2125;--ink:#e6eaec;--dim:#98a3ab;--rule:#2c343a;
--faint:#242b30;--worst:#f08a3c;--mean:#56b4e9;--baseline:#2fc295;--bound:#cf93bd;--peer:#8391a0;--warn:#3a2a12;
--warn-ink:#ffd9a3;--run-0:#56b4e9;--run-1:#f0a23c;--run-2:#2fc295;--run-3:#d797c4;--run-4:#8fd3f4;--run-5:#e8dc5a;
--run-6:#a5b0b9;--run-7:#ff8f8a}}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
header,nav,main,footer{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:44px}
h1{font-size:34px;line-height:1.15;margin:0 0 10px;letter-spacing:-.02em;font-weight:650}
h2{font-size:19px;margin:0 0 12px;font-weight:650;letter-spacing:-.01em}
h3{font-size:15px;margin:20px 0 8px;font-weight:600}
p{margin:0}
.kicker{color:var(--dim);font-size:12px;letter-spacing:.09em;text-transform:uppercase}
.facts{color:var(--dim)}
.facts span:not(:last-child)::after{content:"·";padding:0 .5em}
.banner{background:var(--warn);color:var(--warn-ink);border-radius:8px;padding:9px 14px;margin-top:12px}
nav{display:flex;flex-wrap:wrap;gap:4px 12px;margin-top:18px;padding-top:12px;padding-bottom:12px;font-size:13px}
nav a{color:var(--dim);text-decoration:none}
nav a:hover,nav a:focus{color:var(--mean);text-decoration:underline}
section{padding:26px 0;border-top:1px solid var(--rule)}
.remark,.missing{color:var(--dim);font-size:13.5px;margin-bottom:10px}
.missing{font-style:italic}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px}
.card{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
.card .label{color:var(--dim);font-size:13px}
.card .figure{font-size:29px;font-weight:640;letter-spacing:-.02em;line-height:1.25}
.card .note{color:var(--dim);font-size:12.5px;line-height:1.35}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,345px),1fr));gap:14px}
.chart{margin:0;background:var(--panel);border:1px solid var(--rule);border-radius:10px;
padding:12px 12px 4px;min-width:0;position:relative}
.chart figcaption{font-size:13.5px;font-weight:600}
.chart svg{display:block;width:100%;height:auto}
.plot{touch-action:pan-y;border-radius:6px}.plot:focus-visible{outline:2px solid var(--mean)}
.cursor{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 3;pointer-events:none}
.tip{position:absolute;z-index:1;pointer-events:none;background:var(--paper);border:1px solid var(--rule);
border-radius:8px;padding:5px 9px;font-size:12px;line-height:1.45;max-width:70%;overflow-wrap:anywhere;
box-shadow:0 2px 8px #0003}
.tip i{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:0 14px;margin:2px 0 6px;padding:0;
font-size:12px;color:var(--dim)}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
.line{fill:none;stroke-linejoin:round;stroke-linecap:round;stroke-width:2.6}
.line.peer{stroke:var(--peer);stroke-width:1.3;opacity:.65}
.line.worst{stroke:var(--worst)}.line.mean{stroke:var(--mean)}
.line.baseline{stroke:var(--baseline);stroke-dasharray:7 5;stroke-width:2}
.line.bound{stroke:var(--bound);stroke-dasharray:2 4;stroke-width:2.2}
.line.marked{stroke-width:3;opacity:1}
.line.dashed{stroke-dasharray:7 5}.band{opacity:.16;stroke:none}.band.mean{fill:var(--mean)}
.dot.peer{fill:var(--peer)}.dot.worst{fill:var(--worst)}.dot.mean{fill:var(--mean)}.dot.bound{fill:var(--bound)}
i.peer{background:var(--peer)}i.worst{background:var(--worst)}i.mean{background:var(--mean)}
i.baseline{background:var(--baseline)}i.bound{background:var(--bound)}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.tick,.axis-label{fill:var(--dim);font-size:12px;font-family:inherit}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--mean)}
table{border-collapse:collapse;font-size:13.5px;min-width:50%}
th{font-weight:600;text-align:left;color:var(--dim)}
thead th{border-bottom:1px solid var(--rule);font-weight:500;white-space:nowrap}
th,td{padding:5px 18px 5px 0}
tbody tr:nth-child(even) td{background:linear-gradient(var(--faint),var(--faint)) no-repeat -9px 0/calc(100% + 9px)}
td,th{white-space:nowrap}td.text{white-space:normal;overflow-wrap:break-word}
.number{text-align:right}.dim{color:var(--dim)}
.bars{width:100%}.bars td,.bars th{background:none!important}
.bars th{width:1%}.bars .number{width:1%}
.bar{min-width:160px}
.bar i{display:inline-block;height:13px;background:var(--mean);vertical-align:middle;border-radius:2px;min-width:1px}
.bar i+i{border-radius:0}
i.train,.bar i.train{background:var(--mean)}i.gossip,.bar i.gossip{background:var(--worst)}
i.wait,.bar i.wait{background:var(--peer)}
.graph{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:14px}
.graph svg{display:block;margin:0 auto;max-height:640px}
.graph text{fill:var(--ink);text-anchor:middle;font-family:inherit}.graph .title{font-size:16px;font-weight:600}
.graph .note{fill:var(--dim);font-size:12px}
.graph .weight{fill:var(--dim);stroke:var(--panel);font-size:10px;paint-order:stroke;stroke-width:3px}
.graph .edge{fill:none;stroke:var(--dim)}.graph .head{fill:var(--dim)}
.graph .peer{fill:var(--faint);stroke:var(--mean);stroke-width:1.5}.graph .paper{fill:none}
.command{margin-top:12px;white-space:pre-wrap;overflow-wrap:anywhere}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;background:var(--panel);
border:1px solid var(--rule);border-radius:10px;padding:14px 16px;overflow-x:auto}
summary{cursor:pointer;color:var(--dim)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:0;font-size:13.5px}
dt{color:var(--dim)}dd{margin:0}
footer{color:var(--dim);font-size:12.5px;padding-top:22px;padding-bottom:44px}
@media (max-width:600px){header,nav,main,footer{padding-left:14px;padding-right:14px}header{padding-top:26px}
h1{font-size:27px;overflow-wrap:anywhere}th,td{padding-right:12px}.bar{min-width:90px}
dl{grid-template-columns:1fr}dd{margin-bottom:6px;overflow-wrap:anywhere}}
@media print{nav{display:none}.chart,.card{break-inside:avoid}}
"""

STYLE += "\n".join(
    f".line.run-{n}{{stroke:var(--run-{n})}}.dot.run-{n},.band.run-{n}{{fill:var(--run-{n})}}i.run-{n}{{background:var(--run-{n})}}"
    for n in range(8)
)
