"""``moepad repro`` and ``moepad compare`` as a caller meets them."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from moepad_cli.app import main
from moepad_cli.schema import schema_text

COUNT = ("repro", "--fault", "count", "--tokens", "20", "--bucket", "64", "--attn-tp", "4")
NO_CUDA = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def expect_report(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """The one document on standard output, held to the schema."""
    assert main([*arguments, "--device", "cpu", "--format", "json"]) == exit_code
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    jsonschema.validate(document, json.loads(schema_text()))
    return document


def test_the_built_in_scenario_shows_both_faults_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    document = expect_report(capsys, "repro")
    assert document["verdict"]["lines"] == [
        "fault mask: before, prefix: reproduced: 0 of 33 real rows masked, 95 of 95 pads routed (PAD001, PAD004)",
        "fault mask: after, fixed: gone: 0 of 33 real rows masked, 0 of 95 pads routed, no finding",
        "fault count: before, prefix: reproduced: 19 of 33 real rows masked, 19 of 95 pads routed "
        "(PAD001, PAD002, PAD003)",
        "fault count: after, fixed: gone: 0 of 33 real rows masked, 0 of 95 pads routed, no finding",
    ]
    assert len({row["dp_rank"] for row in document["tables"]["local_counts"]}) == 2
    assert {row["attn_tp_rank"] for row in document["tables"]["local_counts"]} == {0, 1, 2, 3}


def test_the_count_fault_of_twenty_tokens_holds_the_worked_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = expect_report(capsys, *COUNT)
    rows = document["tables"]["local_counts"]
    assert [row["before_count"] for row in rows] == [5, 5, 5, 5]
    assert [row["after_count"] for row in rows] == [16, 4, 0, 0]
    assert sum(row["before_real_masked"] for row in rows) == 11
    assert sum(row["before_pads_routed"] for row in rows) == 11
    assert document["verdict"]["exit_code"] == 0
    assert document["scenario"]["tokens"] == [20]
    assert document["environment"]["device"] == "cpu"
    assert document["environment"]["torch"] == torch.__version__


def test_a_refused_count_is_null_and_never_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    rows = expect_report(capsys, "repro", "--fault", "mask")["tables"]["local_counts"]
    assert {row["before_count"] for row in rows} == {None}
    assert [row["after_count"] for row in rows] == [16, 4, 0, 0, 13, 0, 0, 0]


TABLE = """\
before: prefix   after: fixed   device: cpu
tokens 20   bucket 64   attention TP 4   prefill
16 experts, top-2   platform cuda

fault count: local counts of each rank (branch grouped)
DP  TP  rows   real   count  count    lost  leaked   lost  leaked
                     before  after  before  before  after   after
--  --  -----  ----  ------  -----  ------  ------  -----  ------
 0   0  0-15     16       5     16      11       0      0       0
 0   1  16-31     4       5      4       0       1      0       0
 0   2  32-47     0       5      0       0       5      0       0
 0   3  48-63     0       5      0       0       5      0       0
lost: real rows masked (ids -1); leaked: pad rows routed

fault count: rows gone wrong
engine  DP  TP  what    rows
------  --  --  ------  -----
prefix   0   0  lost    5-15
prefix   0   1  leaked  20
prefix   0   2  leaked  32-36
prefix   0   3  leaked  48-52
"""


def test_the_table_is_what_a_person_sees_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COUNT, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(TABLE)
    assert max(len(line) for line in out.split("\nfindings:")[0].splitlines()) <= 80
    assert "…" not in out


def test_twelve_experts_are_shown_or_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    def experts(*more: str) -> list[int]:
        main([*COUNT, "--experts", "40", *more])
        table = capsys.readouterr().out.split("routes of each expert\n")[1].split("\nall ")[0]
        return [int(line.split()[0]) for line in table.splitlines()[2:]]

    assert len(experts()) == 12
    assert experts("--all-experts") == list(range(40))


def test_csv_is_the_local_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COUNT, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["attn_tp_rank"], row["before_count"], row["after_count"]) for row in rows] == [
        ("0", "5", "16"),
        ("1", "5", "4"),
        ("2", "5", "0"),
        ("3", "5", "0"),
    ]


def test_every_file_is_written_and_standard_output_is_left_to_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--junit-xml", "r.xml", "--html", "r.html", "--save", "r.json", "--output", "r.txt"]
    assert main([*COUNT, *files]) == 0
    assert capsys.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.txt", "r.xml"]
    assert (tmp_path / "r.txt").read_text().startswith("before: prefix")


def test_an_option_overrides_the_scenario_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(
        'tokens = [20]\nbuckets = [32, 64]\nreplicated = true\nplatform = "hip"\n'
    )
    arguments = ("repro", "--scenario", "case.toml", "--bucket", "128", "--no-replicated")
    scenario = expect_report(capsys, *arguments)["scenario"]
    chosen = ("tokens", "bucket", "buckets", "replicated", "platform")
    assert [scenario[name] for name in chosen] == [[20], 128, [], False, "hip"]


def test_a_scenario_that_shows_no_fault_exits_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    document = expect_report(capsys, "repro", "--fault", "count", "--tokens", "64", exit_code=1)
    assert document["verdict"]["lines"][0].startswith(
        "fault count: before, prefix: did not reproduce, since no rank owns a pad row"
    )
    assert document["verdict"]["not_checked"] == [
        "fault count: no rank owns a pad row in this scenario, so that none can leak"
    ]


def test_a_fix_that_does_not_hold_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch-native refuses the count in 0.5.17 too."""
    document = expect_report(capsys, "repro", "--fault", "mask", "--branch", "torch-native", exit_code=1)
    assert "still there" in document["verdict"]["lines"][1]


@pytest.mark.parametrize("router", ["sigmoid-top1", "softcap", "sparse-mixer", "grouped", "degenerate"])
@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_both_faults_show_with_every_router_on_both_platforms(
    capsys: pytest.CaptureFixture[str], router: str, platform: str
) -> None:
    top_k = "1" if router == "sigmoid-top1" else "2"
    expect_report(
        capsys, "repro", "--router", router, "--top-k", top_k, "--platform", platform, "--pad-fill", "nan"
    )


ROUTER = """\
import torch

def best(hidden_states, gating_output, topk, renormalize):
    print("noise on standard output")
    gating_output.mul_(2)
    weights, ids = gating_output.softmax(-1).topk(topk)
    return weights, ids.int()

def crowd(hidden_states, gating_output, topk, renormalize):
    weights, ids = (gating_output + gating_output.mean(0)).softmax(-1).topk(topk)
    return weights, ids.int()

def raises(**_):
    raise RuntimeError("no\\nluck")

def swapped(hidden_states, gating_output, topk, renormalize):
    return best(hidden_states, gating_output, topk, renormalize)[::-1]

def short(hidden_states, gating_output, topk, renormalize):
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return weights[:, :1], ids[:, :1]

def narrow(hidden_states, gating_output, topk, renormalize):
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return weights, ids.short()

def leaves(**_):
    raise SystemExit(0)

def sparse(hidden_states, gating_output, topk, renormalize):
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return weights.to_sparse(), ids

def disturbs(hidden_states, gating_output, topk, renormalize):
    import os
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    os.chdir("/")
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return weights.double(), ids

def cancelled(**_):
    import asyncio
    raise asyncio.CancelledError

def interrupted(**_):
    raise KeyboardInterrupt

def stopped(**_):
    import signal
    signal.raise_signal(signal.SIGTERM)

def fakes(hidden_states, gating_output, topk, renormalize):
    from torch._subclasses.fake_tensor import FakeTensorMode
    answer = best(hidden_states, gating_output, topk, renormalize)
    FakeTensorMode().__enter__()
    return answer

def cancelled_on_pads(hidden_states, gating_output, topk, renormalize):
    return cancelled() if len(gating_output) > 1 else best(hidden_states, gating_output, topk, renormalize)

def fakes_on_pads(hidden_states, gating_output, topk, renormalize):
    which = fakes if len(gating_output) > 1 else best
    return which(hidden_states, gating_output, topk, renormalize)

def negated(hidden_states, gating_output, topk, renormalize):
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return torch._neg_view(-weights), torch._neg_view(-ids)

def beyond(hidden_states, gating_output, topk, renormalize):
    weights, ids = best(hidden_states, gating_output, topk, renormalize)
    return weights, ids + gating_output.shape[1]

def counts(hidden_states, gating_output, topk, renormalize):
    with open("calls", "a") as file:
        file.write(".")
    return best(hidden_states, gating_output, topk, renormalize)

def finite(hidden_states, gating_output, topk, renormalize):
    assert gating_output.isfinite().all(), "pads reached the router"
    return best(hidden_states, gating_output, topk, renormalize)

class Lost:
    def __getattr__(self, name):
        raise RuntimeError("nothing here")

lost = Lost()
number = 7
"""


@pytest.fixture
def router_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(ROUTER)
    return "mine.py"


def test_a_routing_function_of_ones_own_is_run_and_may_print_and_write_into_its_inputs(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    arguments = ["repro", "--router", f"{router_file}:best", "--device", "cpu", "--format", "json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]["exit_code"] == 0
    assert "noise on standard output" in err


def test_a_routing_function_may_disturb_torch_and_the_folder_for_itself_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, router_file: str
) -> None:
    router = ("--router", f"{router_file}:disturbs", "--device", "cpu")
    assert main(["repro", *router, "--save", "run.json"]) == 0
    assert (tmp_path / "run.json").is_file()
    assert torch.get_default_dtype() is torch.float32
    assert main(["compare", "--before", "run.json", "--after", "fixed", *router]) == 0
    assert "run.json#prefix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        (
            "cancelled_on_pads",
            3,
            "moepad repro: prefix: the router gave every real row a route of its own, but not the padded batch: "
            "mine.py:cancelled_on_pads raised CancelledError",
        ),
        (
            "fakes_on_pads",
            3,
            "moepad repro: prefix: the router gave every real row a route of its own, but not the padded batch: "
            "mine.py:fakes_on_pads left FakeTensorMode entered; enter modes of torch in a with statement",
        ),
        ("interrupted", 130, ""),
        ("stopped", 143, ""),
    ],
)
def test_what_a_routing_function_raises_or_leaves_is_no_internal_error(
    capsys: pytest.CaptureFixture[str], router_file: str, function: str, code: int, says: str
) -> None:
    assert main(["repro", "--router", f"{router_file}:{function}"]) == code
    out, err = capsys.readouterr()
    assert (out, [line for line in err.splitlines() if "noise" not in line]) == ("", [says] if says else [])


def test_a_routing_function_is_not_asked_again_to_save_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, router_file: str
) -> None:
    def calls(*more: str) -> int:
        (tmp_path / "calls").write_text("")
        assert main(["repro", "--router", f"{router_file}:counts", "--tokens", "5,3", *more]) == 0
        return len((tmp_path / "calls").read_text())

    # Once for each of 8 real rows; on 8 shards by prefix, after its refusal of the count, and by fixed.
    assert calls() == calls("--save", "run.json") == 8 + 8 + 8
    (tmp_path / "calls").write_text("")
    router = ("--router", f"{router_file}:counts", "--fault", "mask")
    assert main(["compare", "--before", "run.json", "--after", "run.json", *router]) == 0
    assert len((tmp_path / "calls").read_text()) == 8


def test_a_negated_view_is_saved_as_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, router_file: str
) -> None:
    saved = []
    for function in ("best", "negated"):
        assert main(["repro", "--router", f"{router_file}:{function}", "--save", "run.json"]) == 0
        saved.append(json.loads((tmp_path / "run.json").read_text())["cases"])
    assert saved[0] == saved[1]


def test_ids_of_a_routing_function_that_no_expert_has_are_findings_with_a_remap_too(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    router = ("--router", f"{router_file}:beyond", "--fault", "mask", "--eplb", "static")
    assert main(["repro", *router, "--format", "json", "--save", "run.json"]) == 1
    live = json.loads(capsys.readouterr().out)
    assert {f["code"] for f in live["findings"] if f["engine"] == "fixed"} == {"PAD008"}
    assert main(["compare", "--before", "run.json", "--after", "run.json", *router, "--format", "json"]) == 1
    again = json.loads(capsys.readouterr().out)
    assert again["tables"]["local_counts"] == live["tables"]["local_counts"]
    assert changes(again) == {
        ("fixed", "mask", "PAD001"),
        ("fixed", "mask", "PAD004"),
        ("remaining", "mask", "PAD008"),
    }


def test_a_router_that_raises_on_the_padded_batch_only_could_not_be_verified(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    router = ("--router", f"{router_file}:finite")
    assert main(["repro", "--pad-fill", "zeros", *router]) == 0
    capsys.readouterr()
    assert main(["repro", "--pad-fill", "nan", *router, "--junit-xml", "r.xml"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "moepad repro: prefix: the router gave every real row a route of its own, but not the padded batch: "
        "mine.py:finite raised AssertionError: pads reached the router"
    )
    assert "<error" in Path("r.xml").read_text()


def test_what_a_router_of_ones_own_was_not_asked_is_said(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    assert main(["repro", "--router", f"{router_file}:best", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["not_checked"] == [
        "router mine.py:best with pads that hold nan or inf (--pad-fill)",
        "fault count: runs on branch grouped, where router mine.py:best is not called",
    ]


def test_a_routing_function_that_looks_at_other_rows_is_told(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    document = expect_report(
        capsys, "repro", "--fault", "mask", "--router", f"{router_file}:crowd", exit_code=1
    )
    assert {finding["code"] for finding in document["findings"] if finding["engine"] == "fixed"} == {"PAD019"}


WRONG = [
    ("--tokens -1", "--tokens"),
    ("--tokens 1.5", "--tokens"),
    ("--tokens ''", "--tokens"),
    ("--tokens 20,,13", "--tokens"),
    ("--tokens 99999999999", "--tokens"),
    ("--tokens 1000000000 --bucket 1000000000", "--tokens"),
    ("--tokens 65", "--bucket"),
    ("--bucket 0", "--bucket"),
    ("--bucket twelve", "--bucket"),
    ("--bucket 64 --buckets 64", "--buckets"),
    ("--buckets 8,16", "--buckets"),
    ("--raw-length 5", "--raw-length"),
    ("--attn-tp 0", "--attn-tp"),
    ("--attn-tp 5000", "--attn-tp"),
    ("--attn-tp", "--attn-tp"),
    ("--align 0", "--align"),
    ("--dp-padding longest", "--dp-padding"),
    ("--max-padding-factor nan", "--max-padding-factor"),
    ("--max-padding-factor 0", "--max-padding-factor"),
    ("--branch softmax --router degenerate", "--router"),
    ("--tokens 60000 --bucket 65536 --experts 512", "--tokens"),
    ("--replicated --attn-tp 4096 --tokens 4000 --bucket 65536", "--tokens"),
    ("--mode extend", "--mode"),
    ("--tokens-per-request 2", "--tokens-per-request"),
    ("--mode decode --tokens-per-request 2", "--tokens"),
    ("--pad-fill noise", "--pad-fill"),
    ("--platform rocm", "--platform"),
    ("--branch topk", "--branch"),
    ("--experts 0", "--experts"),
    ("--top-k 17", "--top-k"),
    ("--top-k 0", "--top-k"),
    ("--branch grouped --experts 18", "--num-expert-group"),
    ("--branch grouped --topk-group 9", "--topk-group"),
    ("--router grouped --top-k 9", "--top-k"),
    ("--router sofmax", "--router"),
    ("--router no.such.module:f", "--router"),
    ("--router absent.py:f", "--router"),
    ("--router mine.py:absent", "--router"),
    ("--router mine.py:number", "--router"),
    ("--router mine.py:raises", "--router"),
    ("--router mine.py:swapped", "--router"),
    ("--router mine.py:short", "--router"),
    ("--router mine.py:narrow", "--router"),
    ("--router broken.py:f", "--router"),
    ("--router mine.py:leaves", "--router"),
    ("--router mine.py:sparse", "--router"),
    ("--router mine.py:cancelled", "--router"),
    ("--router mine.py:fakes", "--router"),
    ("--router mine.py:lost.attribute", "--router"),
    ("--redundant-experts 2", "--redundant-experts"),
    ("--branch torch-native --eplb static", "--eplb"),
    ("--id-dtype int8", "--id-dtype"),
    ("--weight-dtype float64", "--weight-dtype"),
    ("--routed-scaling-factor 0", "--routed-scaling-factor"),
    ("--seed -1", "--seed"),
    ("--renormalize --no-renormalize", "--renormalize"),
    ("--fault all", "--fault"),
    ("--device gpu", "--device"),
    ("--scenario absent.toml", "--scenario: absent.toml: "),
    ("--scenario malformed.toml", "--scenario: malformed.toml: "),
    ("--scenario unknown.toml", "--scenario: unknown.toml: line 2: unknown key 'tokenz'"),
    ("--scenario .", "--scenario: .: "),
    ("--output absent/r.txt", "--output"),
    ("--save /proc/nothing/run.json", "--save"),
    ("--format yaml", "--format"),
    ("--tokenz 20", "--tokenz"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_a_wrong_invocation_exits_2_with_one_line_that_names_the_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, router_file: str, arguments: str, says: str
) -> None:
    (tmp_path / "malformed.toml").write_text("tokens = [20\n")
    (tmp_path / "unknown.toml").write_text("bucket = 64\ntokenz = [20]\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    before = sorted(os.listdir(tmp_path))
    assert main(["repro", *(word.strip("'") for word in arguments.split(" "))]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line != "noise on standard output"]
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith(f"moepad repro: {says}")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device here")
def test_a_cuda_device_that_is_not_there_could_not_be_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repro", "--device", "cuda"]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", "moepad repro: --device: this torch sees no CUDA device; give cpu or auto\n")


def expect_comparison(
    capsys: pytest.CaptureFixture[str], before: str, after: str, *more: str, exit_code: int
) -> Any:
    return expect_report(capsys, "compare", "--before", before, "--after", after, *more, exit_code=exit_code)


def changes(document: Any) -> set[tuple[str, str, str]]:
    return {(row["change"], row["fault"], row["code"]) for row in document["tables"]["finding_changes"]}


ONE = ("--tokens", "20,13")
MASK = {("mask", code) for code in ("PAD001", "PAD004")}
COUNTS = {("count", code) for code in ("PAD001", "PAD002", "PAD003")}


def test_compare_sorts_findings_into_fixed_introduced_and_remaining(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert changes(expect_comparison(capsys, "prefix", "fixed", *ONE, exit_code=0)) == {
        ("fixed", *key) for key in MASK | COUNTS
    }
    assert changes(expect_comparison(capsys, "fixed-mask", "fixed-count", *ONE, exit_code=1)) == {
        *(("introduced", *key) for key in MASK),
        *(("fixed", *key) for key in COUNTS),
    }
    assert changes(expect_comparison(capsys, "prefix", "fixed-mask", *ONE, exit_code=1)) == {
        *(("fixed", *key) for key in MASK),
        *(("remaining", *key) for key in COUNTS),
    }


def test_compare_reads_back_what_repro_saved(capsys: pytest.CaptureFixture[str]) -> None:
    live = expect_report(capsys, "repro", "--tokens", "20,0", "--save", "run.json")
    saved = expect_comparison(capsys, "run.json", "run.json", exit_code=0)
    assert saved["tables"]["local_counts"] == live["tables"]["local_counts"]
    renamed = [{**finding, "engine": f"run.json#{finding['engine']}"} for finding in live["findings"]]
    assert saved["findings"] == renamed
    assert saved["scenario"] == live["scenario"]
    assert changes(expect_comparison(capsys, "run.json", "run.json#prefix", exit_code=1)) == {
        ("remaining", row["fault"], row["code"]) for row in saved["tables"]["finding_changes"]
    }


def test_compare_saves_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    expect_comparison(capsys, "fixed-mask", "fixed", *ONE, "--save", "run.json", exit_code=0)
    expect_comparison(capsys, "run.json#fixed-mask", "fixed", exit_code=0)
    expect_comparison(capsys, "prefix", "run.json#fixed-mask", exit_code=1)


def test_a_suite_cannot_be_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--before", "fixed", "--after", "fixed", "--save", "run.json"]) == 2
    expected = "moepad compare: --save: a suite cannot be saved; give the options of one scenario\n"
    assert capsys.readouterr().err == expected
    assert not Path("run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--after fixed", "--before: missing"),
        ("--before prefx --after fixed", "--before: 'prefx' is no engine; did you mean 'prefix'?"),
        ("--before absent.json --after fixed", "--before: absent.json: No such file"),
        (
            "--before prefix --after run.json#fixd",
            "--after: run.json: has no engine 'fixd'; it has prefix, fixed",
        ),
        (
            "--before run.json --after fixed --tokens 21",
            "--tokens: [21] is not what the saved run 'run.json' was made",
        ),
        ("--before prefix --after text.json", "--after: text.json: not JSON"),
    ],
)
def test_a_wrong_comparison_exits_2_with_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, says: str
) -> None:
    (tmp_path / "text.json").write_text("run")
    expect_report(capsys, "repro", "--save", "run.json")
    assert main(["compare", *arguments.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moepad compare: {says}")
    assert err.count("\n") == 1


def test_a_saved_run_may_not_choose_which_code_runs(
    capsys: pytest.CaptureFixture[str], router_file: str
) -> None:
    router = ("--router", f"{router_file}:best")
    assert main(["repro", *router, "--save", "run.json"]) == 0
    capsys.readouterr()
    assert main(["compare", "--before", "run.json", "--after", "fixed"]) == 2
    assert capsys.readouterr().err.startswith(
        "moepad compare: --router: the saved run 'run.json' routes through"
    )
    assert main(["compare", "--before", "run.json", "--after", "fixed", *router]) == 0


def test_a_saved_run_is_not_judged_by_another_router(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, router_file: str
) -> None:
    router = ("--router", f"{router_file}:best")
    assert main(["repro", *router, "--save", "run.json"]) == 0
    path = tmp_path / router_file
    path.write_text(path.read_text().replace("mul_(2)", "mul_(-2)"))
    capsys.readouterr()
    assert main(["compare", "--before", "run.json", "--after", "fixed", *router]) == 3
    assert "routes single rows otherwise than it did" in capsys.readouterr().err


def test_a_side_that_gives_no_count_is_not_verified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expect_report(capsys, *COUNT, "--save", "run.json")
    path = tmp_path / "run.json"
    saved = json.loads(path.read_text())
    for rank in saved["cases"][0]["after"]["ranks"]:
        rank["num_token_non_padded"] = None
    path.write_text(json.dumps(saved))
    document = expect_comparison(capsys, "prefix", "run.json", "--fault", "count", exit_code=3)
    assert document["verdict"]["status"] == "not-verified"
    assert document["verdict"]["not_checked"] == ["fault count: run.json#fixed gave no count on 4 ranks"]


@pytest.mark.parametrize(
    ("scenario", "reasons"),
    [
        (
            "--tokens 64",
            [
                "mask: no rank owns a pad row in this scenario, so that none can leak",
                "count: no rank owns a pad row in this scenario, so that none can leak",
            ],
        ),
        (
            "--tokens 20 --attn-tp 1 --replicated --fault count",
            [
                "count: localised or whole, the count of every rank is the same here, so that either looks right",
            ],
        ),
        (
            "--tokens 0 --max-padding-factor 2",
            [
                "mask: no rank owns a pad row in this scenario, so that none can leak",
                "count: every DP rank runs eagerly, so that no graph replays a count",
            ],
        ),
    ],
)
def test_a_comparison_in_which_no_case_could_tell_anything_is_not_verified(
    capsys: pytest.CaptureFixture[str], scenario: str, reasons: list[str]
) -> None:
    document = expect_comparison(capsys, "prefix", "fixed-mask", *scenario.split(" "), exit_code=3)
    verdict = document["verdict"]
    assert (verdict["status"], verdict["summary"]) == ("not-verified", "not verified")
    assert verdict["not_checked"] == [f"fault {reason}" for reason in reasons]


def test_a_saved_run_of_one_fault_cannot_answer_for_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    expect_report(capsys, *COUNT, "--save", "run.json")
    assert main(["compare", "--before", "run.json", "--after", "fixed", "--format", "json"]) == 3
    out, err = capsys.readouterr()
    assert err == "moepad compare: run.json: holds no case of fault mask\n"
    assert json.loads(out)["verdict"]["not_checked"] == ["run.json: holds no case of fault mask"]
    jsonschema.validate(json.loads(out), json.loads(schema_text()))
    expect_comparison(capsys, "run.json", "fixed", "--fault", "count", exit_code=0)
