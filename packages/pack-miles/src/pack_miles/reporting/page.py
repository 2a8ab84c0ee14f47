"""The report as one HTML file that needs nothing else: no network, no scripts, pictures inside."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from pack_miles.reporting.balance import LoadPicture, Planning
from pack_miles.reporting.figures import (
    LEAST_SMOOTHED,
    MOST_STEPS,
    draw_fill,
    draw_forwards,
    draw_packs,
    draw_rewards,
    draw_times,
    svg,
)
from pack_miles.reporting.gain import told_layers
from pack_miles.reporting.load_figures import draw_loads
from pack_miles.reporting.planning_report import PLANNING_HEADINGS, planning_figures, planning_rows
from pack_miles.reporting.report import COUNT_NOTE, key_figures, labels, recorded_ranks, reward_span, saved_share
from pack_miles.reporting.summary import Report, RunSummary
from pack_miles.reporting.waiting import waiting_told

STYLE = """
:root { color-scheme: light dark;
  --ink: #1d1d1f; --soft: #5f6368; --line: #d9dbe0; --ground: #f5f6f8; --card: #ffffff; --alarm: #b3421b; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #ececee; --soft: #a4a8b0; --line: #3a3d44; --ground: #17181b; --card: #212328; --alarm: #ff9b73; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 21px; margin: 44px 0 4px; }
h3 { font-size: 16px; margin: 30px 0 8px; }
p { margin: 6px 0; } .soft, figcaption { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 18px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 18px; }
figure { margin: 0 0 18px; } .pair figure { margin: 0; }
.picture { background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 10px 12px;
  overflow-x: auto; }
.picture svg { display: block; width: 100%; height: auto; }
.wide svg { min-width: 760px; }
figcaption { font-size: 14px; padding: 6px 4px 0; }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line); }
th, td { text-align: left; vertical-align: top; padding: 6px 12px; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; } th { font-weight: 600; }
.numbers td, .numbers th { font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers td, .numbers th + th { text-align: right; }
.scroll { overflow-x: auto; } pre { overflow-x: auto; font-size: 13px; }
details { margin: 14px 0; } summary { cursor: pointer; font-weight: 600; }
.problem { color: var(--alarm); }
"""

PACKS = (
    "Each bar is one pack, the row of one forward; ranks run their packs side by side. A block is one sample, as wide "
    "as it has tokens: neighbouring blocks of one colour answer the same prompt; colours repeat after eight prompts; "
    "the number in a block is its tokens. Grey is capacity left empty: the closer the bars come to the limit, the "
    "fewer forwards are needed. The percentage is the pack's fill."
)
ROWS = (
    "Each bar is the row of one forward and holds one sample, as wide as it has tokens, in the colour of its prompt; "
    "colours repeat after eight prompts. Grey is capacity left empty, the percentage is the row's fill. Packing would "
    "put several samples into one row."
)
PACKS_AGAIN = "The same for the last update of the run: responses may have grown or shrunk as the policy learned."
REWARDS = (
    "Dots are the mean reward of each collection. The band is one standard deviation of the samples, cut to the "
    "possible range: from the smallest to the largest reward of the collection."
)
REWARDS_SMOOTHED = " The line smooths over a tenth of the run on either side; where it rises, the policy learns."
FILL = "How much of the capacity holds tokens."
FILL_BAND = (
    " The band reaches from the least to the most filled rank; a wide band means that ranks with few tokens wait for "
    "ranks with many."
)
FILL_SMOOTHED = " The dark line and the band are smoothed over a twentieth of the run on either side."
FORWARDS = (
    "Forwards that one rank runs in an update, scoring included; grey is what one sample a row would take. "
    "A count is not a wall time: a packed forward is larger and takes longer."
)
FORWARDS_SINGLE = "Forwards that one rank runs in an update, scoring included; every forward holds one sample."
TIMES = (
    "Seconds of the slowest rank in each update, rollout left out. The seconds of a scoring pass over several updates "
    "are shared equally among them."
)

LOADS = (
    "The load of every rank in every pack, before and after planning on one colour scale: {unit}. Framed is the most "
    "loaded rank of each pack: the critical path. {about} On the right the works of this update in percent of "
    "arrival order; the line is a bound that no order can beat and that need not be reachable. Counts are not seconds."
)
LOADS_EXPERTS = (
    "Loads are summed over {layers}; expert work adds up the most loaded rank of each layer on its own, so it is at "
    "least the sum of the framed loads.{replicas}"
)
LOADS_REPLICAS = " Lines part the replicas, complete sets of experts whose ranks exchange tokens."
LOADS_AGAIN = "The same for the last reordered update. Counts are not seconds."
LOADS_TOKENS = "Token work is the sum of the framed loads."


def write_page(report: Report, path: Path) -> None:
    """Write the report to `path` as one HTML file; a file already there is replaced as a whole or not at all."""
    text = render_page(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def render_page(report: Report) -> str:
    """Return the report as HTML; the same report always gives the same text."""
    names = ", ".join(labels(report))
    several = len(report.runs) > 1
    body = [f"<h1>{escape(names)}</h1>", f'<p class="soft">{_subtitle(report)}, from the contract log.</p>']
    if several:
        body.append(_table(report))
    for number, (run, label) in enumerate(zip(report.runs, labels(report), strict=True)):
        if several:
            body.append(f"<h2>{escape(label)}</h2>")
        body += _run(run, f"run{number}")
        if not several:
            body += ["<h3>Key figures</h3>", _table(report)]
        body += _background(run)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(names)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(report: Report) -> str:
    if any(not run.updates for run in report.runs) or len({run.one_a_row for run in report.runs}) > 1:
        return "Reinforcement learning"
    return "Reinforcement learning, one sample a row" if report.runs[0].one_a_row else "Packed reinforcement learning"


def _run(run: RunSummary, name: str) -> Iterator[str]:
    ended = "soft" if run.status in ("finished", "not finished") else "problem"
    yield f'<p class="soft">{escape(run.directory)} — <span class="{ended}">{escape(run.status)}</span></p>'
    yield _tiles(run)
    if not run.updates:
        yield "<p>No update is recorded.</p>"
        return
    forwards = _figure(draw_forwards(run), f"{name}-forwards", FORWARDS_SINGLE if run.one_a_row else FORWARDS)
    rewards = ""
    if run.collections:
        smoothed = REWARDS_SMOOTHED if len(run.collections) >= LEAST_SMOOTHED else ""
        rewards = _figure(draw_rewards(run), f"{name}-reward", REWARDS + smoothed)
    yield f'<div class="pair">{rewards}{forwards}</div>'
    if run.pictures:
        yield "<h3>What the ranks run</h3>"
    packs = ROWS if run.one_a_row else PACKS
    for place, picture in enumerate(run.pictures):
        yield _figure(draw_packs(picture), f"{name}-packs{place}", PACKS_AGAIN if place else packs, wide=True)
    if run.planning is not None and run.planning.balanced:
        yield from _planning(run, run.planning, name)
    yield "<h3>How full, how long</h3>"
    fill, times = draw_fill(run), draw_times(run)
    about = FILL + (FILL_BAND if any(len(row.fill) > 1 for row in run.updates) else "")
    about += FILL_SMOOTHED if len(run.updates) > MOST_STEPS else ""
    yield f'<div class="pair">{_figure(fill, f"{name}-fill", about)}{_figure(times, f"{name}-times", TIMES)}</div>'
    if run.waiting is not None:
        yield "<h3>Sampling while training</h3>"
        yield _said(waiting_told(run.waiting))


def _planning(run: RunSummary, planning: Planning, name: str) -> Iterator[str]:
    yield "<h3>What planning changed</h3>"
    head = "".join(f"<th>{escape(heading)}</th>" for heading in PLANNING_HEADINGS)
    rows = "".join(
        f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td>{escape(text)}</td>" for text in row[1:]) + "</tr>"
        for row in planning_rows(planning)
    )
    yield f'<div class="scroll"><table class="numbers"><tr>{head}</tr>{rows}</table></div>'
    yield _said(planning_figures(run, planning))
    for place, picture in enumerate(planning.pictures):
        caption = LOADS_AGAIN if place and _same_kind(picture, planning.pictures[0]) else _loads_caption(picture)
        yield _figure(draw_loads(picture), f"{name}-loads{place}", caption, wide=True)


def _said(figures: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p>{escape(label)}: {escape(text)}</p>" for label, text in figures)


def _same_kind(one: LoadPicture, other: LoadPicture) -> bool:
    return (one.destinations, one.layers) == (other.destinations, other.layers)


def _loads_caption(picture: LoadPicture) -> str:
    if not picture.experts:
        return LOADS.format(unit="tokens", about=LOADS_TOKENS)
    replicas = LOADS_REPLICAS if len(picture.before) > picture.destinations > 1 else ""
    about = LOADS_EXPERTS.format(layers=told_layers(picture.layers, picture.routed_layers), replicas=replicas)
    return LOADS.format(unit="expert choices", about=about)


def _background(run: RunSummary) -> Iterator[str]:
    if run.problems:
        yield "<h3>What could not be read</h3>"
        yield from (f'<p class="problem">{escape(problem)}</p>' for problem in run.problems)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))
    yield f'<p class="soft">{escape(versions)}</p>'
    configuration = json.dumps(run.configuration, indent=2, sort_keys=True, ensure_ascii=False)
    yield f"<details><summary>Configuration</summary><pre>{escape(configuration)}</pre></details>"


def _tiles(run: RunSummary) -> str:
    tiles = []
    ranks = recorded_ranks(run)
    if (span := reward_span(run)) is not None:
        tiles.append((span, "mean reward, first → last tenth of the run"))
    if (share := saved_share(run)) is not None:
        saved = f"forwards of one rank: {run.forwards:,} instead of {run.forwards_single:,} with one sample a row"
        tiles.append((share, saved))
    elif run.one_a_row:
        tiles.append((f"{run.forwards:,}", "forwards of one rank, one sample a row"))
    if run.fill is not None:
        filled = "of the rows' capacity is filled, one sample a row"
        filled = filled if run.one_a_row else "of the packs' capacity is filled"
        tiles.append((f"{run.fill:.1%}", f"{filled}, {ranks}" if run.missing else filled))
    if run.tokens_per_second is not None:
        tiles.append((f"{run.tokens_per_second:,.0f}", f"model tokens a second in scoring and training, {ranks}"))
    drawn = "".join(f'<div class="tile"><b>{escape(big)}</b>{escape(small)}</div>' for big, small in tiles)
    return f'<div class="tiles">{drawn}</div>'


def _table(report: Report) -> str:
    columns = [key_figures(run) for run in report.runs]
    head = "".join(f"<th>{escape(label)}</th>" for label in labels(report))
    rows = "".join(
        f"<tr><th>{escape(row[0][0])}</th>" + "".join(f"<td>{escape(text)}</td>" for _, text in row) + "</tr>"
        for row in zip(*columns, strict=True)
    )
    note = f'<p class="soft">{escape(COUNT_NOTE)}</p>'
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>{note}'


def _figure(figure: Figure, name: str, caption: str, wide: bool = False) -> str:
    frame = "picture wide" if wide else "picture"
    said = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure><div class="{frame}">{svg(figure, name)}</div>{said}</figure>'
