"""What the pages say is so: links, commands, targets, figures, maps."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from maskfleet.cli.main import app
from maskfleet.config.recipes import recipe
from maskfleet.training.schedule import schedule_for

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "maskfleet"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# typer brings its own click or uses the real one, by its version; this is the base of either's errors.
[USAGE_ERROR] = [kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"]
SHELL_LANGUAGES = ("", "console", "bash", "sh")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of `text` that lead nowhere from `page`."""
    broken = []
    for link in LINK.findall(BLOCK.sub("", text)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def shown_commands(text: str) -> list[list[str]]:
    """The words of every `maskfleet …` in the code blocks of `text`, comments and what a shell takes left out."""
    commands = []
    for language, block in BLOCK.findall(text):
        for line in block.splitlines() if language in SHELL_LANGUAGES else ():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            starts = [place for place, word in enumerate(words) if word in ("maskfleet", ".venv/bin/maskfleet")]
            if starts and (starts[0] == 0 or words[0] in ("mpirun", "torchrun")):
                commands.append(until_shell(words[starts[0] + 1 :]))
    return commands


def until_shell(words: list[str]) -> list[str]:
    ends = [place for place, word in enumerate(words) if word in (">", "|", "&&", "&")]
    return words[: ends[0]] if ends else words


def parse(words: list[str]) -> None:
    """Have the command line read `words`, and run nothing."""
    command = typer.main.get_command(app)
    rest = [word for word in words if not (word.startswith("[") and word.endswith("]"))]  # optional, as in [--link]
    rest = [word.split("|")[0] for word in rest]  # a choice, as in yolo|voc
    while (inner := getattr(command, "commands", None)) is not None:
        assert rest, "a group of commands without one of them"
        assert rest[0] in inner, f"there is no command {rest[0]}"
        command = inner[rest.pop(0)]
    command.make_context(command.name, rest).close()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def named_targets(text: str) -> set[str]:
    """Targets of every `make …` that stands in code, in a block or between backticks."""
    blocks = [block for _, block in BLOCK.findall(text)]
    pieces = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    found = [piece.split("#")[0].split() for piece in pieces if piece.split()[:1] == ["make"]]
    return {word for words in found for word in words[1:] if "=" not in word}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, text_of(page)) == []


def test_a_link_to_nothing_is_noticed() -> None:
    text = "[a](docs/none.md) [b](README.md) [c](#no-such-heading) [d](https://example.org/x)\n```\n[e](no)\n```\n"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "#no-such-heading"]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_shown_can_be_typed(page: Path) -> None:
    for words in shown_commands(text_of(page)):
        try:
            parse(words)
        except USAGE_ERROR as error:
            pytest.fail(f"maskfleet {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("line", ["train", "train runs/x --gpu 2", "trian runs/x", "data inspect --split", "weights"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    [words] = shown_commands(f"```\n$ maskfleet {line}   # words that are no words\n```\n")
    with pytest.raises((USAGE_ERROR, AssertionError)):
        parse(words)


def test_the_way_from_nothing_to_a_picture_is_shown() -> None:
    shown = [" ".join(words[:2]) for words in shown_commands(text_of(ROOT / "docs" / "start" / "quickstart.md"))]
    for command in ("demo", "data inspect", "data convert", "train runs/mine", "eval runs/mine", "predict runs/mine"):
        assert command in shown


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_make_target_named_exists(page: Path) -> None:
    assert named_targets(text_of(page)) <= make_targets()


def test_make_targets_are_found_in_code_and_not_in_prose() -> None:
    text = "You make it. `make demo` or `make PYTHON=python3.12 test`.\n```\nmake check   # make this\nmaker x\n```\n"
    assert named_targets(text) == {"demo", "test", "check"}


def test_the_configuration_reference_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_page.py"))
    assert text_of(ROOT / "docs" / "reference" / "config.md") == script["page"](), "run: python scripts/config_page.py"


def test_the_configuration_reference_has_old_names_and_aliases_beside_a_field() -> None:
    [row] = [
        line
        for line in text_of(ROOT / "docs" / "reference" / "config.md").splitlines()
        if line.startswith("| `model.mask` |")
    ]
    assert row.endswith("| true \\| false | `true` | `MODE_MASK`, `mode_mask` |")


def map_entries(text: str) -> list[Path]:
    """Files and folders that the source layout names, from the root."""
    [block] = [block for _, block in BLOCK.findall(text) if block.startswith("src/maskfleet/")]
    entries, folder = [], Path()
    for line in block.splitlines():
        name = Path(line.split()[0])
        if line.startswith(" "):
            entries.append(folder / name)
        else:
            folder = name
            entries.append(name)
    return entries


def test_the_source_layout_names_every_package_and_nothing_else() -> None:
    entries = map_entries(text_of(ROOT / "docs" / "reference" / "layout.md"))
    missing = [str(entry) for entry in entries if not (ROOT / entry).exists()]
    assert missing == []
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    packages |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert {entry.name for entry in entries if entry.parent == Path("src/maskfleet")} == packages


def test_the_files_that_answer_where_to_look_exist() -> None:
    rows = re.findall(r"^\| Where .*?\| (.+) \|$", text_of(ROOT / "docs" / "reference" / "layout.md"), re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(files) > 8
    assert [name for name in files if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()] == []


def result(name: str) -> dict[str, dict[str, float]]:
    loaded: dict[str, dict[str, float]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))
    return loaded


def figures_of(page: Path) -> list[list[str]]:
    """Ours and the peer's figure of every table row that names a result file."""
    rows = [line for line in text_of(page).splitlines() if line.startswith("|") and "benchmarks/results/" in line]
    return [re.findall(r"\| ([\d.]+)(?:,[^|]*)? ", row)[:2] for row in rows]


def test_the_figures_of_the_endpoint_page_are_those_of_the_result_file() -> None:
    found: Any = result("endpoint.json")
    page = text_of(ROOT / "docs" / "run-anywhere" / "endpoint.md")
    for name, cases in found["results"].items():
        height, width = found["image_sizes"][name]
        rates = " | ".join(f"{case['images_per_cpu_s']:.1f}" for case in cases)
        memory = max(case["memory_mib"]["last_quarter"] for case in cases)
        assert f"| {name}, {height} x {width} px | {rates} | {memory:.0f} MiB |" in page
        assert sum(case["errors"] for case in cases) == 0
    assert f"load average {found['machine']['load_before']:.0f})" in page


def test_the_figures_of_the_readme_are_among_those_of_the_speed_page() -> None:
    figures = figures_of(ROOT / "README.md")
    assert len(figures) == 3
    assert all(row in figures_of(ROOT / "docs" / "train" / "speed.md") for row in figures)


def test_the_padding_on_the_loading_page_is_that_of_the_result_file() -> None:
    splits: Any = result("padding.json")["splits"]
    page = text_of(ROOT / "docs" / "data" / "loading.md")
    for number, mode in enumerate(("orientation", "tight", "none")):
        [row] = re.findall(rf"^\| `{mode}`(?:, one image per batch)? \| (\d.*)$", page, re.MULTILINE)
        uses = [splits[name][number] for name in ("train2017", "val2017")]
        assert re.findall(r"([\d.]+) %(?:,| \|)", row) == [f"{100 * use['padding']:.1f}" for use in uses]
        saved = [f"{100 * use['saved']:.1f}" for use in uses] if mode == "tight" else []
        assert re.findall(r"([\d.]+) % fewer", row) == saved


def test_the_figures_of_the_speed_page_are_those_of_the_result_files() -> None:
    figures = figures_of(ROOT / "docs" / "train" / "speed.md")
    loader, scoring, store = result("loader.json"), result("eval.json"), result("store.json")
    rate = loader["images_per_cpu_s"]
    step: Any = result("step.json")
    [pair] = [row for row in step["alone"] if "peer" in row]
    [detect] = [row for row in step["alone"] if row["what"] == "detect"]
    fed, overfit, shapes = result("fed.json"), result("overfit.json"), result("convergence.json")
    assert figures == [
        [f"{pair['images_per_s']:.0f}", f"{pair['peer']['images_per_s']:.0f}"],
        [f"{fed['fed_images_per_s']:.0f}", f"{fed['alone_images_per_s']:.0f}"],
        [f"{detect['images_per_s']:.0f}"],
        [f"{shapes['box_ap']['compiled']['mean']:.3f}", f"{shapes['box_ap']['eager']['mean']:.3f}"],
        [f"{overfit['scores']['bbox']['ap']:.3f}"],
        [f"{result('checkpoint.json')['blocked_ms']['median_of_rest']:.0f}"],
        [f"{rate['maskfleet']:.0f}", f"{rate['peer']:.0f}"],
        [f"{rate['maskfleet_resize_on_device']:.0f}", f"{rate['peer']:.0f}"],
        [f"{scoring['maskfleet']['cpu_s']:.1f}", f"{scoring['pycocotools']['cpu_s']:.1f}"],
        [f"{store['reopen']['seconds']:.2f}", f"{store['pycocotools']['seconds']:.1f}"],
        [f"{store['reopen']['private_mib']:.0f}", f"{store['pycocotools']['private_mib']:.0f}"],
    ]


def test_the_first_step_on_the_speed_page_has_the_parts_and_times_of_the_result_file() -> None:
    found: Any = result("start.json")
    page = " ".join(text_of(ROOT / "docs" / "train" / "speed.md").split())
    assert list(found["cases"]) == ["cold"]
    cold, parts = found["cases"]["cold"], found["main_thread_s_of_first_minute"]
    assert f"first step after {cold['to_first_step_s']} s and eager steps at {cold['eager_images_per_s']:.0f}" in page
    assert f"after {cold['to_full_speed_s']} s, of which the switch took {cold['switch_s']}, all steps" in page
    dynamo = parts["imports of torch._dynamo"]
    assert (
        f"the main thread spent {parts['imports'] + dynamo:.1f} s on imports, {dynamo:.1f} of them on `torch._dynamo`, "
        f"{parts['Triton']:.1f} s on Triton's kernels and {parts['waiting for a batch']:.1f} s waiting for a batch. "
        "With a full cache it was not measured."
    ) in page


def test_the_table_of_rates_is_what_the_schedule_computes() -> None:
    text = text_of(ROOT / "docs" / "train" / "training.md")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+), (\d+) \| (\d+) \|$", text, re.M)
    assert [int(row[0]) for row in rows] == [1, 4, 8, 32]
    for row in rows:
        schedule = schedule_for(recipe("r50_fpn_1x").train, world_size=int(row[0]), steps_per_pass=100)
        shape = (schedule.images_per_step, schedule.steps_per_update)
        assert shape == (int(row[1]), int(row[2]))
        assert schedule.full_lr == pytest.approx(float(row[3]))
        assert [step for step, _ in schedule.drops] == [int(row[4]), int(row[5])]
        assert schedule.total_steps == int(row[6])
