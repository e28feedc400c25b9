"""The options of the launchers, parsed by the same rules as the launchers parse them."""

from __future__ import annotations

import argparse
import difflib

from .shell import UNKNOWN, shown

# torch 2.13: torch/distributed/run.py, get_args_parser. (names, takes a value, type)
TORCHRUN = [
    (("--nnodes",), str), (("--nproc-per-node", "--nproc_per_node"), str),
    (("--rdzv-backend", "--rdzv_backend"), str), (("--rdzv-endpoint", "--rdzv_endpoint"), str),
    (("--rdzv-id", "--rdzv_id"), str), (("--rdzv-conf", "--rdzv_conf"), str),
    (("--standalone",), None), (("--max-restarts", "--max_restarts"), int),
    (("--monitor-interval", "--monitor_interval"), float),
    (("--start-method", "--start_method"), str),
    (("--event-log-handler", "--event_log_handler"), str), (("--role",), str),
    (("-m", "--module"), None), (("--no-python", "--no_python"), None),
    (("--run-path", "--run_path"), None), (("--log-dir", "--log_dir"), str),
    (("-r", "--redirects"), str), (("-t", "--tee"), str),
    (("--local-ranks-filter", "--local_ranks_filter"), str),
    (("--duplicate-stdout-filters", "--duplicate_stdout_filters"), str),
    (("--duplicate-stderr-filters", "--duplicate_stderr_filters"), str),
    (("--node-rank", "--node_rank"), int), (("--master-addr", "--master_addr"), str),
    (("--master-port", "--master_port"), int), (("--local-addr", "--local_addr"), str),
    (("--logs-specs", "--logs_specs"), str), (("--numa-binding", "--numa_binding"), str),
    (("--signals-to-handle", "--signals_to_handle"), str),
    (("--shutdown-timeout", "--shutdown_timeout"), int),
    (("--virtual-local-rank", "--virtual_local_rank"), None),
]  # fmt: skip
LAUNCH = [*TORCHRUN, (("--use-env", "--use_env"), None)]  # torch.distributed.launch
DEEPSPEED = [
    (("-H", "--hostfile"), str), (("-i", "--include"), str), (("-e", "--exclude"), str),
    (("--num_nodes",), int), (("--min_elastic_nodes",), int), (("--max_elastic_nodes",), int),
    (("--num_gpus", "--num_accelerators"), int), (("--master_port",), int),
    (("--master_addr",), str), (("--node_rank",), int), (("--launcher",), str),
    (("--launcher_args",), str), (("--module",), None), (("--no_python",), None),
    (("--no_local_rank",), None), (("--no_ssh",), None), (("--no_ssh_check",), None),
    (("--force_multi",), None), (("--save_pid",), None), (("--enable_each_rank_log",), str),
    (("--autotuning",), str), (("--comment",), str), (("--account",), str),
    (("--elastic_training",), None), (("--bind_cores_to_rank",), None),
    (("--bind_core_list",), str), (("--ssh_port",), int),
    (("--venv_script",), str), (("--log_level",), str), (("-q", "--quiet"), None),
]  # fmt: skip
# Of accelerate's many options those that take no value: all others take one.
ACCELERATE_SWITCHES = {
    "cpu", "multi_gpu", "tpu", "ipex", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_xpu",
    "same_network", "debug", "quiet", "module", "no_python", "enable_cpu_affinity", "help",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation",
    "downcast_bf16", "tpu_use_cluster", "no_tpu_cluster", "tpu_use_sudo", "use_parallelism_config",
    "use_mps_device", "tpu_cluster",
}  # fmt: skip
FLAGS_OF_TORCHRUN = {
    name for names, _ in TORCHRUN for name in names
    if any(part in name for part in ("nnodes", "nproc", "rdzv", "node", "master", "standalone"))
}  # fmt: skip


MOST_WORDS = 1000  # of one line


class Refused(Exception):
    """What the launcher's own parser would say."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)

    def exit(self, status=0, message=None):
        raise Refused(message or "")


def _typed(kind):
    def convert(text: str):
        if UNKNOWN in text:
            return text
        try:
            return str(kind(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a whole number") from None

    return convert


def _parser(table) -> _Parser:
    parser = _Parser(add_help=False)
    for names, kind in table:
        dest = next(n for n in names if n.startswith("--"))[2:].replace("-", "_")
        if kind is None:
            parser.add_argument(*names, action="store_true", dest=dest)
        else:
            convert = _typed(kind) if kind in (int, float) else str
            parser.add_argument(*names, dest=dest, type=convert, default=None)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


PARSERS = {"torchrun": _parser(TORCHRUN), "launch": _parser(LAUNCH),
           "deepspeed": _parser(DEEPSPEED)}  # fmt: skip


def parse(launcher: str, words: list[str]) -> tuple[dict, list[tuple[str, str, str]]]:
    """(options by name, script and args among them; problems as (name, detail, fix)).

    What the launcher would refuse is a problem; the rest is read without it, so that what else
    is wrong is named too.
    """
    if launcher == "accelerate":
        return _accelerate(words), []
    parser, problems, words = PARSERS[launcher], [], list(words[:MOST_WORDS])
    names = [n for a in parser._actions for n in a.option_strings]
    program = {"launch": "torch.distributed.launch"}.get(launcher, launcher)
    for _ in range(6):  # problems of one line
        try:
            known, extra = parser.parse_known_args(words)
        except Refused as e:
            bad, text = None, str(e)
            for i, word in enumerate(words):
                name = word.partition("=")[0]
                if name.startswith("-") and f"ambiguous option: {word}".split("=")[0] in text:
                    bad, text = i, f"{shown(name)} is short for more than one option"
                    break
                # "argument --node-rank/--node_rank: …": the option as written may be shortened
                said = text.partition(":")[0].removeprefix("argument ").split("/")
                if text.startswith("argument ") and any(
                    s == name or (len(name) > 3 and s.startswith(name)) for s in said
                ):
                    bad, text = i, f"{shown(word)}: {text.partition(': ')[2]}"
                    break
            if bad is None:
                if "required" in text:
                    if UNKNOWN not in "".join(words):
                        problems.append(("script", f"{program} is given no script to start",
                                         "put the script's name after the options"))  # fmt: skip
                else:
                    problems.append(("option", f"{program} refuses the line: {shown(text)}",
                                     f"see {program} --help"))  # fmt: skip
                return _best(parser, words), problems
            kind = "option"
            for part, check in (("node-rank", "node rank"), ("master-port", "endpoint")):
                if str(e).startswith("argument") and part in str(e):
                    kind = check
            problems.append((kind, f"{text}; {program} refuses the line", "a whole number from 0"
                             if kind != "option" else f"see {program} --help"))  # fmt: skip
            takes = "=" not in words[bad] and bad + 1 < len(words)
            follows = takes and not words[bad + 1].startswith("-") and "is short" not in text
            words[bad : bad + 1 + bool(follows)] = []
            continue
        flags = [e for e in extra if e.startswith("-") and e in words]
        if not flags:
            return vars(known), problems
        flag = flags[0]
        if UNKNOWN not in flag.partition("=")[0]:
            name = flag.partition("=")[0]
            near = difflib.get_close_matches(name, names, 1, 0.75)
            problems.append(("option", f"{program} has no option {shown(name)}, and refuses the "
                             "line", f"write {near[0]}" if near else "put options of the script "
                             "behind its name"))  # fmt: skip
            if near and "=" in flag:
                words[words.index(flag)] = near[0] + "=" + flag.partition("=")[2]
                continue
            if near:
                words[words.index(flag)] = near[0]
                continue
        at = words.index(flag)
        value = at + 1 < len(words) and "=" not in flag and not words[at + 1].startswith("-")
        more = value and not words[at + 1].endswith(".py")
        words[at : at + 1 + bool(more)] = []
    return _best(parser, words), problems


def _best(parser, words) -> dict:
    """The options of a line that cannot be parsed whole."""
    try:
        return vars(parser.parse_known_args([*words, "", ""])[0]) | {"script": None, "args": []}
    except Refused:
        return vars(parser.parse_known_args(["", ""])[0]) | {"script": None, "args": []}


def _accelerate(words: list[str]) -> dict:
    """accelerate takes - and _ alike, and no abbreviations."""
    options: dict = {"script": None, "args": []}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-"):
            if UNKNOWN in word and not word.endswith(".py") and not options["script"]:
                continue  # "$ARGS" may hold any options
            options["script"], options["args"] = word, words[i:]
            break
        name, equals, value = word.partition("=")
        name = {"-m": "module", "-q": "quiet", "-h": "help", "-t": "tee"}.get(
            name, name.lstrip("-").replace("-", "_")
        )
        if name in ACCELERATE_SWITCHES:
            options[name] = True
        elif equals:
            options[name] = value
        elif i < len(words):
            options[name] = words[i]
            i += 1
    return options
