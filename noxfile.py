"""One session a job. `nox -l` lists them; `nox` proves everything, `nox -s demo` runs the main job."""

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True

#: Package -> the packages of this repository it needs, itself last. They go into one pip call: the siblings
#: pin each other with `==` and are on no index.
CLOSURE = {
    "pack-core": ["pack-core"],
    "pack-torch": ["pack-core", "pack-torch"],
    "pack-miles": ["pack-core", "pack-torch", "pack-miles"],
}
ALL = CLOSURE["pack-miles"]
SOURCES = [f"packages/{name}/src" for name in ALL]
TORCH = "torch==2.13.0"

#: One thread each: the tests start several processes, and a result must not depend on the number of cores.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: Two tests at a time: the most that the limits of the tests of several processes were tried with.
PYTEST = ["pytest", "--numprocesses=2"]

#: Packers that the benchmarks measure beside ours.
PEERS = ["lightbinpack==0.1.1", "grain==0.2.18", "trl==1.16.0", "transformers==5.24.0", "torchtune==0.6.1"]
PEERS += ["torchao==0.9.0"]  # newer ones lack what torchtune imports

#: Bytes of pack-core's wheel, a third of which are docstrings.
LARGEST_CORE = 155_000

#: pip compiles all of torch to byte code where importing compiles the few modules that are used.
os.environ.setdefault("PIP_COMPILE", "0")


def group(path: str, name: str) -> list[str]:
    """Return the requirements of one dependency group of a pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(path), name)


def editable(names: list[str]) -> list[str]:
    """Return pip's arguments for installing packages of this checkout in place."""
    return [argument for name in names for argument in ("-e", f"packages/{name}")]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install(*group("pyproject.toml", "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check all three packages with a strict type checker."""
    session.install(*group("pyproject.toml", "types"), *editable(ALL), TORCH)
    session.run("mypy", *SOURCES)


@nox.session
@nox.parametrize("package", list(CLOSURE), ids=list(CLOSURE))
def tests(session: nox.Session, package: str) -> None:
    """Test one package with nothing installed but what it declares."""
    session.install(*editable(CLOSURE[package]), *group(f"packages/{package}/pyproject.toml", "test"))
    session.run(*PYTEST, f"tests/{package.replace('-', '_')}", *session.posargs, env=THREADS)


@nox.session
def workspace(session: nox.Session) -> None:
    """Check what spans the packages: imports, versions, public names, and every documented example."""
    session.install(*editable(ALL), *group("packages/pack-miles/pyproject.toml", "test"))
    session.run(*PYTEST, "tests/workspace", env=THREADS)
    session.run(*PYTEST, "--doctest-modules", *SOURCES, env=THREADS)
    pages = [
        "README.md",
        "docs/denominators.md",
        "docs/coming_from.md",
        *[f"packages/{name}/README.md" for name in ALL],
    ]
    session.run("pytest", "--doctest-glob=*.md", *pages, env=THREADS)


@nox.session
def peers(session: nox.Session) -> None:
    """Compare with other projects' packages, installed from the index in an environment of their own."""
    session.install(*editable(ALL), *group("packages/pack-miles/pyproject.toml", "test"))
    # MILES' wheel declares twenty heavy packages; the modules asked here need only these.
    session.install("--no-deps", "miles-rl==0.0.2", "verl==0.9.1")  # of verl, one module
    session.install("httpx", "packaging", "pydantic", "pyyaml", "tqdm")
    # In one call, so that none brings its own torch; what follows `tokenizers` is for grain's own tests.
    names = ("transformers==5.24.0", "trl==1.16.0", "tokenizers", "grain==0.2.18", "absl-py", "ml_dtypes")
    session.install(TORCH, *names)
    offline = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    session.run(*PYTEST, "tests/peers", *session.posargs, env=THREADS | offline)


@nox.session
def core(session: nox.Session) -> None:
    """Train real OLMo-core models on packed rows, on a CPU, in an environment of their own."""
    session.install(*editable(ALL), *group("packages/pack-miles/pyproject.toml", "test"))
    # OLMo-core declares pandas and more, with caps on what else may be there; building and running models needs these.
    session.install("--no-deps", "ai2-olmo-core==3.0.0", "cached-path==1.8.10")
    names = ("bettermap==1.3.1", "dataclass-extensions==0.5.0", "boto3", "google-cloud-storage", "huggingface_hub")
    session.install(TORCH, *names, "pyyaml")
    session.run(*PYTEST, "tests/core_backend", *session.posargs, env=THREADS | {"HF_HUB_OFFLINE": "1"})


@nox.session
def ray(session: nox.Session) -> None:
    """Use what the extras bring, all on this machine: a real Ray, Hugging Face datasets, the real client of W&B."""
    session.install(*editable(ALL), *group("packages/pack-miles/pyproject.toml", "test"))
    session.install(TORCH, "ray[data]==2.60.0", "datasets", "wandb==0.31.0", "jsonschema", "torchdata==0.11.0")
    offline = {"WANDB_MODE": "offline", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    # One at a time: two Rays that start at once on two cores outlast the limits of their tests.
    session.run("pytest", "tests/extras", *session.posargs, env=THREADS | offline)


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheels and use them from a clean environment outside the checkout."""
    session.install("build", "virtualenv")
    work = Path(session.create_tmp()).resolve()
    shutil.rmtree(work / "dist", ignore_errors=True)
    for name in ALL:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(work / "dist"), f"packages/{name}", silent=True)
    (core,) = (work / "dist").glob("pack_core-*.whl")
    if core.stat().st_size > LARGEST_CORE:
        session.error(
            f"{core.name} has {core.stat().st_size:,} bytes, more than {LARGEST_CORE:,}: it is embedded in others"
        )
    smoke = Path("tests/smoke.py").resolve()
    session.chdir(work)  # a path of the checkout must not make a missing file of the wheel look present
    for name in ("pack-core", "pack-miles"):
        session.run("virtualenv", "-q", "--clear", "clean", silent=True)
        python = str(work / "clean" / "bin" / "python")
        torch = [] if name == "pack-core" else [TORCH]
        install = ["install", "-q", "--find-links", "dist", name, *torch]
        session.run(python, "-m", "pip", *install, external=True)
        session.run(python, "-I", str(smoke), name, external=True)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train the small model on packed rows, four ranks, and report."""
    session.install("-q", *editable(ALL), *group("packages/pack-miles/pyproject.toml", "demo"))
    output = Path("runs/demo")
    shutil.rmtree(output, ignore_errors=True)  # the demo starts afresh each time; its folder is named in .gitignore
    for command in ("validate", "plan", "train"):
        session.run("pack-miles", command, "examples/demo.toml", *session.posargs, env=THREADS)
    session.run("pack-miles", "audit", str(output))
    session.run("pack-miles", "report", str(output), "--html", str(output / "report.html"))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure everything of the registry beside peers, and write a report: `-- --quick`, `-- NAME ...`."""
    session.install("-q", *editable(ALL), *group("packages/pack-miles/pyproject.toml", "demo"), TORCH, *PEERS)
    session.install("-q", "--no-deps", "verl==0.9.1")  # one module of it is read
    session.run("python", "benchmarks/run.py", *session.posargs, env=os.environ | THREADS | {"HF_HUB_OFFLINE": "1"})


@nox.session(default=False)
def bench_balancing(session: nox.Session) -> None:
    """Measure balanced planning beside peers' balancers and a judge that anneals."""
    session.install("-q", *editable(["pack-core", "pack-torch"]), TORCH, "numba", "rich")
    session.install("-q", "--no-deps", "miles-rl==0.0.2", "verl==0.9.1")  # one module of each is read
    session.run("python", "benchmarks/balancing.py", *session.posargs, env=os.environ | THREADS)
    session.run("python", "benchmarks/counting.py", env=os.environ | THREADS)


@nox.session(default=False)
def bench_offline(session: nox.Session) -> None:
    """Measure packing of a whole dataset beside TRL's, and the planner's memory."""
    session.install("-q", *editable(["pack-core", "pack-torch"]), TORCH, "transformers==5.24.0", "trl==1.16.0")
    session.install("-q", "datasets", "pyarrow>=18", "rich")
    session.run("python", "benchmarks/offline.py", *session.posargs, env=os.environ | THREADS)
    session.run("python", "benchmarks/offline.py", "--memory", env=os.environ | THREADS)


@nox.session(default=False)
def bench_sweep(session: nox.Session) -> None:
    """Sweep expert parallel degree and pack budget on the small model."""
    session.install("-q", *editable(ALL), *group("packages/pack-miles/pyproject.toml", "demo"))
    session.run("python", "benchmarks/sweep.py", *session.posargs, env=os.environ | THREADS)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Stream ten million lengths through a packer; memory must grow by less than 10 MB after the first million."""
    session.install("-q", *editable(["pack-core"]))
    session.run("python", "scripts/soak.py", *session.posargs, env=THREADS)
