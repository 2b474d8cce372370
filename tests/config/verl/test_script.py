"""Launch scripts are read as bash reads them, and never executed."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigError
from millrace.extras.verl.script import read
from tests.sweeps import sweep

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# a comment with an "open quote
project='DAPO'   # why
exp="dapo-${SIZE:-7b}"
export len=$((1024 * 2)) 
total=$(((512*100)))
HOME_DIR=${HOME_DIR:-"/data/x y"}
MODEL="${MODEL:-$HOME_DIR/m}"
COMMON=(
  actor_rollout_ref.actor.grad_clip=1.0  # one
  "+a.b=[1, 2]"
)
COMMON+=(trainer.nnodes=2)
echo a.txt=b
python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name='fully_async_ppo_trainer.yaml' \
    data.train_files="['$HOME_DIR/a.parquet', \"b\"]" \
    data.max_prompt_length=${len} \
    rollout.total_rollout_steps=${total} \
    actor_rollout_ref.model.path="${MODEL}" \
    trainer.experiment_name="${exp##*-}-${exp%-*}" \
    ++x.y='$no' "${COMMON[@]}" $@ 2>&1 | tee log.txt
"""


def as_bash_says(text: str, folder: Path) -> list[str]:
    """Return the overrides that bash passes to `python3`, which is a program of our own here."""
    program = folder / "python3"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$(dirname "$0")/said"\n')
    program.chmod(0o755)
    (folder / "run.sh").write_text(text)
    path = f"{folder}:/usr/bin:/bin"
    command = ["/bin/bash", str(folder / "run.sh")]
    subprocess.run(command, env={"PATH": path}, cwd=folder, check=True, capture_output=True)
    words = (folder / "said").read_text().split("\0")[:-1]
    return [w for w in words if "." in w.partition("=")[0] and "=" in w and w[:2] != "--"]


def test_overrides_are_those_that_bash_would_pass(tmp_path: Path) -> None:
    script = read(SCRIPT, {})
    assert script.overrides == as_bash_says(SCRIPT, tmp_path)
    assert "actor_rollout_ref.model.path=/data/x y/m" in script.overrides
    assert script.base == "verl/fully_async_ppo_trainer"


@given(st.lists(st.integers(0, 999), min_size=3, max_size=3), st.sampled_from("+-*/%"))
@settings(max_examples=8, deadline=None)
def test_arithmetic_is_that_of_bash(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], sign: str
) -> None:
    a, b, c = numbers[0], numbers[1] + 1, numbers[2]
    text = f"n={a}\npython3 t.x=$((n {sign} {b} + {c})) t.y=$(( ({c} - ${{n}}) {sign} {b} ))\n"
    assert read(text, {}).overrides == as_bash_says(text, tmp_path_factory.mktemp("bash"))


@pytest.mark.parametrize(
    "text",
    [
        "A=1 B=2 python3 t.x=1 t.y=2\n",
        'A=1; B="2 3"; python3 t.x=$A t.y="$B"\n',
        "OPTS='t.x=1 t.y=2'\nOPTS+=' t.z=3'\npython3 $OPTS t.w=4\n",
        'declare -a ARGS=(t.x=1)\npython3 "${ARGS[@]}"\n',
        "true && python3 t.x=1 || echo t.y=2\n",
        "cat <<EOF\nM=4 it's\nt.x=1\nEOF\nM=5\npython3 t.x=$M\n",
        "# M=3 \\\nM=5\npython3 t.x=$M\n",
        ': "${N:=4}"\npython3 t.x=$N t.y=${N:+on} t.z=$((${N}*${M:-3}))\n',
        'A=(t.x=1)\nB=("${A[@]}" t.y=2)\npython3 "${B[@]}" ${A[@]+"${A[@]}"} "${C[@]:-}"\n',
        'K=t.x\nA=t.z=1\npython3 "t.w"=1 $K=1 "$A" > log.x=1 | true t.y=2\n',
        'python3 "t.x=\\d \\"q r\\"" t.y=it"\'"s t.z=it\\"s t.w=${1:-8}\n',
        "P=/x/y.parquet\npython3 t.x=${P%/y?parquet} t.y=${P#/x/} t.z=${P##*.}\n",
        "A=1 & A=2\npython3 t.x=$A &\nwait\n",
        'EXTRA="t.x=1 t.y=2"\npython3 ${EXTRA:-} t.z=3 ${NONE:-t.u=1 t.v=2}\n',
        'A=(t.x=1)\npython3 "${E[@]:-t.x=1}" t.y=2 ${A[@]:+t.z=1}\n',
        "X=()\nM=4\npython3 t.x=${X:-y} t.y=${M:?needed}\n",
        "GPUS=($(echo 1 2))\n: ${X:=$(echo 3)}\npython3 t.x=1\n",
        "python3 t.x='q #r' t.y=q\\ #r t.z=q#r # t.w=1\n",
        "X=1\nf() { local X=$1 Y=2; }\nf 7\npython3 t.x=$X t.y=${Y:-}\n",
        "X=1\ng() (\n  X=3\n)\n( X=2; echo $X )\ng\npython3 t.x=$X\n",
        'f() {\n  if [ "$1" = a ]; then\n    return\n  fi\n  X=2\n}\nX=1\nf a\npython3 t.x=$X\n',
        "f() { X=1; }\nif false; then\n  f() { X=2; }\nfi\nf\npython3 t.x=$X\n",
        'A=t.x=1\nA+=(t.y=2)\nB=(t.z=1 t.u=1)\nB+=2\npython3 "${A[@]}" "${B[@]}"\n',
        'A=(t.x=1 t.y=2)\nA=t.z=1\npython3 "${A[@]}" $A\n',
        'O="1 t.y=2"\nA="t.z=1 t.w=2"\npython3 t.x=$O ${A[@]}\n',
        'A=(a b)\nT="[${A[*]}]"\nIFS=,\npython3 "t.x=[${A[*]}]" "t.y=$T" t.z=$[${#A[@]} * 2]\n',
        'm=7b\nif [[ $m == "*b" ]]; then X=1; else X=2; fi\npython3 t.x=$X\n',
        "m=x\ncase $m in '*') X=1 ;; *) X=2 ;; esac\npython3 t.x=$X\n",
        "m=7b\nif [[ $m == [0-9]* ]]; then X=1; else X=2; fi\npython3 t.x=$X\n",
        "m=Qwen3\ncase $m in *[Qq][Ww]en?) X=1 ;; *) X=2 ;; esac\npython3 t.x=$X\n",
    ],
)
def test_commands_are_taken_apart_as_bash_does(tmp_path: Path, text: str) -> None:
    assert read(text, {}).overrides == as_bash_says(text, tmp_path)


def test_a_list_of_overrides_needs_no_command() -> None:
    text = "--config-name=ppo_megatron_trainer\na.b=1\n+c.d=[x,y]\nmodel_engine=megatron\n~e\n"
    found = read(text, {})
    assert found.overrides == ["a.b=1", "+c.d=[x,y]", "~e", "model_engine=megatron"]
    assert found.config == "ppo_megatron_trainer"


MADE_UP = {
    "a launcher that a probe chooses": (
        'L=(python3)\nif command -v uv; then\n  L=(uv run python3)\nfi\n"${L[@]}" -m '
        "verl.trainer.main_ppo data.train_files=$HOME/a.parquet trainer.x=$PWD\n",
        {},
    ),
    "a device that a case decides": (
        'DEVICE=${DEVICE:-$(probe)}\nN=${N:-}\nEXTRA=()\ncase "${DEVICE}" in\n  gpu)\n'
        "    N=${N:-8}\n    EXTRA+=(\n      rollout.a=1\n    )\n    ;;\n  npu | cpu) N=16 ;;\n"
        '  *) exit 1 ;;\nesac\nif [ "$DEVICE" = gpu ] && { [ $N -ge 8 ] || [ x = y ]; }; then\n'
        "  EXTRA+=(rollout.b=2)\nelse\n  EXTRA+=(rollout.c=3)\nfi\n[ $N -gt 8 ] && V=2 || V=null\n"
        'python3 -m verl.trainer.main_ppo model_engine=megatron trainer.n=$N actor.v=$V "${EXTRA[@]}"\n',
        {"DEVICE": "gpu"},
    ),
    "the other branch": (
        "case $D in (a|b) X=1;; c*) X=2 ;; *) X=3 ;; esac\nif [[ $D == cat && -n $X ]]; then Y=1\n"
        "elif true; then Y=2; fi\npython3 -m verl.trainer.main_ppo t.x=$X t.y=$Y\n",
        {"D": "cat"},
    ),
    "a function with arguments": (
        'run() {\n  local name=$1\n  shift\n  python3 -m verl.trainer.main_ppo t.n=$name "$@" t.z=1\n}\n'
        'run first t.x=1 "t.y=a b"\n',
        {},
    ),
    "options of the script": (
        "M=m\nwhile [[ $# -gt 0 ]]; do case $1 in --m) M=$2; shift 2 ;; esac; done\n"
        'while getopts "k:" o; do M=$OPTARG; done\nfor a in "$@"; do M=$a; done\n'
        '[ -n "$1" ] && M=$1\npython3 -m verl.trainer.main_ppo t.m=$M "${@:2}" "$@"\n',
        {},
    ),
    "texts of words": (
        'A="t.x=1\n  t.y=2"\nB=(t.z=0 $A)\nCMD="python3 -m verl.trainer.main_ppo"\n'
        '$CMD "${B[@]}" ${NONE:-} $A\n',
        {},
    ),
    "a command in an array": (
        'C=(python3 -m verl.trainer.main_ppo "t.x=a b")\nC+=(t.y=1)\n"${C[@]}" 2>&1|tee log\n',
        {},
    ),
    "a command in quotes": (
        "X=1\nbash -c \"python3 -m verl.trainer.main_ppo t.x=$X 't.y=[a, b]'\"\n",
        {},
    ),
    "a submitted job": (
        "ray job submit --address=a --runtime-env-json '{\"a\": 1}' -- env A.b=1 "
        "python3 -m verl.trainer.main_ppo +model_engine=x ~a.b t.x=1 > log 2>&1 &\nwait\n",
        {},
    ),
    "a profiler": (
        "nsys_profile=main_ppo\nenv REPORT=1 python3 -o main_ppo_report -m verl.trainer.main_ppo t.x=1\n",
        {},
    ),
    "torchrun": ("torchrun --nproc=8 -m verl.trainer.main_ppo t.x=1 < /dev/null || exit 1\n", {}),
    "a group in brackets": ("(cd /tmp && python3 -m verl.trainer.main_ppo t.x=$PWD)\n", {}),
    "spellings of values": (
        "M=Org/Name-7B\nA=(1 2)\nF=$(basename ${M}).sh\npython3 -m verl.trainer.main_ppo t.x=${M,,} "
        "t.y=${M//\\//_} t.z=${#A[@]} t.w=${A[1]} t.f=$F t.g=`echo ${#M}` t.h=$(dirname $M)\n",
        {},
    ),
}
"""Scripts of the kinds that verl's examples and its forks have, with the variables that they need."""


@pytest.mark.parametrize("name", MADE_UP)
def test_no_word_of_a_script_is_lost(tmp_path: Path, name: str) -> None:
    text, given = MADE_UP[name]
    for program in ("python3", "uv", "ray", "torchrun"):
        (tmp_path / program).write_text(
            '#!/bin/bash\nfor w in "$@"; do printf "%s\\0" "$w" >> "${0%/*}/said"; done\n'
        )
        (tmp_path / program).chmod(0o755)
    (tmp_path / "run.sh").write_text(text)
    known = {"HOME": "/home/me", "PWD": str(tmp_path)}
    subprocess.run(
        ["/bin/bash", "run.sh"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **known, **given},
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    words = (tmp_path / "said").read_text().split("\0")[:-1]
    after = words[words.index("verl.trainer.main_ppo") + 1 :]
    found = read(text, given, known)
    assert found.overrides == after and found.base == "verl/ppo_trainer"


def test_an_answer_takes_the_place_of_an_array() -> None:
    text = 'A=(a.b=1)\nif [ "$K" = 1 ]; then\n  A+=(a.c=1)\nfi\npython3 "${A[@]}" a.e=1\n'
    assert read(text, {"A": "a.b=2 'a.d=x y'"}).overrides == ["a.b=2", "a.d=x y", "a.e=1"]
    assert read(text, {"K": "1"}).overrides == ["a.b=1", "a.c=1", "a.e=1"]
    assert read('python3 "a.b=[${A[*]}]"', {"A": "x y"}).overrides == ["a.b=[x y]"]
    for name, script in (("KEY", text), ("TP", f"# TP=2\n{text}")):
        with pytest.raises(ConfigError, match="no variable of this name"):
            read(script, {name: "1"})


def test_how_ray_starts_its_workers_is_not_asked_for() -> None:
    text = (
        "R=(ray_kwargs.ray_init.x=null)\nif command -v uv; then\n  R=(ray_kwargs.ray_init.x='uv run')\n"
        'fi\npython3 -m verl.trainer.main_ppo a.b=1 "${R[@]}"\n'
    )
    assert read(text, {}).overrides == ["a.b=1", "ray_kwargs.ray_init.x=null"]
    with pytest.raises(ConfigError, match="R is a list of words"):
        read(text.replace("='uv", "=1 a.c='uv"), {})


def test_a_path_of_the_script_is_known() -> None:
    text = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\npython3 a.b=$D a.c=$(whoami)\n'
    known = {"BASH_SOURCE": "/r/examples/run.sh", "PWD": "/w", "USER": "me"}
    assert read(text, {}, known).overrides == ["a.b=/r", "a.c=me"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python3 -m verl a.b=$GPUS", ["GPUS has no value", "--set GPUS=VALUE"]),
        ("python3 -m verl a.b=$A a.c=$B", ["--set A=VALUE", "--set B=VALUE"]),
        ("n=$(nproc)\npython3 a.b=$n", ["$(nproc) has no value", "--set n=VALUE"]),
        ("n=`nproc`\npython3 a.b=$n", ["nothing is executed", "--set n=VALUE"]),
        ("n=$M\nk=$n\npython3 a.b=$k", ["M has no value"]),
        ("python3 a.b=$((1 +))", ["cannot be computed"]),
        ("python3 a.b=$((2 ** 9))", ["cannot be computed"]),
        ("python3 a.b=$((1 / 0))", ["cannot be computed", "--set a.b=VALUE"]),
        ("python3 a.b=run_$$", ["$$ has no value", "--set a.b=VALUE"]),
        ("x=ab\npython3 a.b=${x/#a/c}", ["${x/#a/c} has no value", "--set a.b=VALUE"]),
        ('A=(x y)\npython3 "a.b=[${A[@]}]"', ["${A[@]} has no value", "--set a.b=VALUE"]),
        ("python3 a.b='open", ["open quote"]),
        ("python3 a.b=${x/y/z}", ["has no value"]),
        ("M=$1\npython3 a.b=$M", ["$1 has no value", "--set M=VALUE"]),
        ("n=$(nproc)\npython3 a.b=${n:-4}", ["$(nproc) has no value"]),
        ("if x; then lr=1; else lr=2; fi\npython3 a.b=$lr", ["inside `if`", "--set lr=VALUE"]),
        ("for i in 1 2; do\nlr=$i\ndone\npython3 a.b=$lr", ["inside `if`"]),
        ('python3 a.b=1 "${MORE[@]}"', ["MORE has no value", '--set MORE="WORDS"']),
        ("lr=1\n[ -f x ] && lr=2\npython3 a.b=$lr", ["lr is set inside", "--set lr=VALUE"]),
        ("lr=1\n[ -f x ] || { lr=2; }\npython3 a.b=$lr", ["lr is set inside"]),
        ("lr=1\nf() {\nlr=2\n}\nx && f\npython3 a.b=$lr", ["lr is set inside"]),
        (
            "lr=1\nd=$(x)\ncase $d in\n*) lr=2 ;;\nesac\npython3 a.b=$lr",
            ["lr is set inside", "--set d=VALUE", "or --set lr=VALUE"],
        ),
        (
            'A=(a.b=1)\nif [ "$GPU" = x ]; then A+=(a.c=1); fi\npython3 "${A[@]}"',
            ["A is a list of words", "a.c=1", "--set GPU=VALUE", '--set A="WORDS"'],
        ),
        ("if [[ a == [!b]* ]]; then X=1; else X=2; fi\npython3 a.b=$X", ["X is set inside"]),
        ("E=\nif x; then E='a.c=1'; fi\npython3 a.b=1 $E", ["E is set", "--set E=VALUE"]),
        ('A=(a.b=1)\nA[0]=a.c=1\npython3 a.d=1 "${A[@]}"', ["A has no value"]),
        ('for i in 1 2; do A+=(a.b=$i); done\npython3 a.c=1 "${A[@]}"', ["for i in 1 2", "A="]),
        ('x && set -- a.b=1\npython3 a.c=1 "$@"', ["$@ is set inside"]),
        ('A=(-m verl.trainer.main_ppo)\nx && A+=(a.b=1)\n"${A[@]}"', ["A is a list", "a.b=1"]),
        ("python3 -m verl.trainer.main_ppo a.b=1 --multirun", ["'--multirun'", "leave it out"]),
        ("python3 -m verl.trainer.main_ppo a.b=1 c.d e=1", ["'c.d'", "override, key=value"]),
        ("python3 -m verl.trainer.main_ppo a.b=1 -cd conf x", ["'-cd'", "conf, x"]),
        ("a.b=1\n--info\n", ["'--info'"]),
        ("n=1\n((n += 1))\npython3 a.b=$n", ["n has no value"]),
        ("n=1\nunset n\npython3 a.b=$n", ["n has no value"]),
        ("python3 main_ppo a.b=1\npython3 main_ppo a.c=1", ["has 2 commands", "a copy"]),
        ("python3 a.b=1 \\\n # a.c=1\n a.d=1", ["bash does not pass", "a.d=1"]),
        ("python3 a.b=1 $MORE", ["MORE has no value"]),
        ("python3 a.b=${M:?needed}", ["M has no value", "--set M=VALUE"]),
        ("G=($(nproc))\npython3 a.b=1 ${G[@]}", ["$(nproc) has no value", "--set G=VALUE"]),
        ('C="python3 -m verl.trainer.main_ppo a.b=$M"\n$C', ["M has no value", "--set M=VALUE"]),
        ('C="python3 main_ppo a.b=$M"\neval $C "$@"', ["M has no value", "--set M=VALUE"]),
        ('C="python3 main_ppo a.b=$M"\nbash -c "$C"', ["M has no value"]),
        (": ${X:=$(nproc)}\npython3 a.b=$X", ["$(nproc) has no value"]),
    ],
)
def test_what_cannot_be_known_is_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, {})
    assert all(part in str(caught.value) for part in ["SCRIPT", *parts])


def test_a_value_from_the_caller_wins() -> None:
    assert read("n=$(nproc)\npython3 a.b=$n", {"n": "8"}).overrides == ["a.b=8"]
    assert read("n=${n:-4}\npython3 a.b=$n", {"n": "8"}).overrides == ["a.b=8"]


@pytest.mark.parametrize(
    ("program", "base"),
    [
        ("-m verl.trainer.main_ppo t.name=vs_fully_async", "verl/ppo_trainer"),
        ("-m verl.trainer.main_ppo t.x=/data/one_step_off/x", "verl/ppo_trainer"),
        ("/home/fully_async/verl/trainer/main_ppo.py t.x=1", "verl/ppo_trainer"),
        ("one_step_off_policy/main_ppo.py t.x=1", "verl/one_step_off_ppo_trainer"),
        ("-m a.fully_async_policy.fully_async_main t.x=1", "verl/fully_async_ppo_trainer"),
    ],
)
def test_the_program_decides_the_base(program: str, base: str) -> None:
    assert read(f"python3 {program}", {}).base == base


def test_a_command_that_prepares_data_gives_no_overrides() -> None:
    text = "python3 prepare.py a.b=1\npython3 -m verl.trainer.main_ppo a.c=1\n"
    assert read(text, {}).overrides == ["a.c=1"]


@given(st.text(alphabet="ab.=$\\{}()'\"# \n+1", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        read(text, {})


TOKENS = """if then else elif fi case in esac ;; ; && || | { } ( ) [ ]
A=1 B=(t.x=1) B+=(t.y=2) "${B[@]}" $A ${A:-3} python3 -m verl.trainer.main_ppo t.x=1 f() f shift
set -- "$@" $(date ` " ' # <<EOF EOF 2>&1 > bash -c eval ((A++)) a) *) unset A[0]=1 for while do done"""


@given(st.lists(st.sampled_from([*TOKENS.split(), "\n", "\n", "\\\n"]), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_commands_are_read_or_refused(tokens: list[str]) -> None:
    with suppress(ConfigError):
        read(" ".join(tokens), {})


RUBBISH = {
    "endless if": "if " * 3000,
    "1500 brackets": "( " * 1500 + "x" + " )" * 1500,
    "an empty test": "[[ ]]",
    "a text that doubles": "X=a\n" + "X=$X$X\n" * 60,
    "an array that doubles": "X=(a)\n" + "X=(${X[@]} ${X[@]})\n" * 60,
    "a function that calls itself": "f() {\n" + "f\n" * 30 + "}\nf",
    "5000 digits": f"[ {'9' * 5000} -gt 1 ]",
    "40 stars": f"[[ {'a' * 5000} == {'*a' * 40}b ]]",
}


LONG = {"1500 brackets", "an array that doubles"}


@pytest.mark.parametrize("name", sweep(RUBBISH, lambda name: name not in LONG))
def test_rubbish_ends_in_an_error_or_is_passed(name: str) -> None:
    text = f"{RUBBISH[name]}\npython3 -m verl.trainer.main_ppo t.x=1"
    with suppress(ConfigError):
        assert read(text, {}).overrides == ["t.x=1"]


@pytest.mark.parametrize("command", ["export A=2 B", "declare B A=2", "readonly A=2 B C=3"])
def test_a_name_without_a_value_does_not_hide_the_values_beside_it(command: str) -> None:
    text = f"A=1\n{command}\npython3 -m verl.trainer.main_ppo t.a=$A"
    assert read(text, {}).overrides == ["t.a=2"]
