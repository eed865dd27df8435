# Everything a developer or CI does starts here; `make help` lists it.
# Needed: Go, make, git, and for the race detector a C compiler. Tools are
# pinned in go.mod and built from there.

SHELL := /bin/sh
GO    ?= go

# What is compiled in one checkout need not be compiled again in another.
export GOFLAGS := $(GOFLAGS) -trimpath

# The modules: what runs, what measures it, and what tests all of it together. go.work
# lets the go command build them from here; what is released is built without it.
# Two are apart, since they bring much: deploy what makes packages, tests/charts what
# checks charts.
MODULES  = . bench tests deploy tests/charts
PACKAGES = ./... ./bench/... ./tests/...

# How long each fuzz target runs, and how long each benchmark (1x: once, so
# that it keeps working; measure with BENCHTIME=2s COUNT=10 and benchstat).
FUZZTIME  ?= 60s
BENCHTIME ?= 1x
COUNT     ?= 1
TIMEOUT   ?= 15m

# make run: flags of `srtm up`, each left out when empty; ARGS is passed as it is.
UP_FLAGS = $(if $(DURATION),--duration=$(DURATION)) $(if $(TRACE),--trace=$(TRACE)) \
	$(if $(COMPRESS),--compress=$(COMPRESS)) $(if $(COPIES),--copies=$(COPIES)) \
	$(if $(PUBLISHERS),--publishers=$(PUBLISHERS)) $(if $(RATE),--rate=$(RATE)) $(ARGS)

# The race detector is C; without a compiler Go sets CGO_ENABLED=0. SQLite, C that was translated to Go, does
# without the detector: with it, SQLite takes most of the processor time of the tests that use it.
RACE := $(if $(filter 1,$(shell $(GO) env CGO_ENABLED)),$(if $(shell command -v $$($(GO) env CC | cut -d' ' -f1)),-race \
	-gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc/...=-race=false))

# The commit goes into the binaries where git can name it.
VCS := $(shell git rev-parse --verify -q HEAD >/dev/null 2>&1 && echo auto || echo false)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help packages programs upstream test-packages test-image test-units test-install test-deploy release-packages release-notes release-check release-snapshot build run test check race lint fmt vet staticcheck check-generated tidy console-assets conformance mqtt-conformance test-clients archtest faults chaos-replicated generate fuzz fuzz-short bench bench-full scaling scale bench-replicated bench-admission bench-gateway convergence figures cover clean no-race-note build/bench soak stress trouble

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What is shipped has no symbol table and no DWARF. Stack traces and profiles need neither.
# grpcnotrace leaves out a debugging page of gRPC, whose templates make the linker keep every method.
BUILD = GOWORK=off CGO_ENABLED=0 $(GO) -C $(1) build -tags=grpcnotrace -trimpath -ldflags='-s -w'

build: ## build all binaries into bin/
	@echo "building nsqd, loaddistributor, tbadaptor, srtm, iotpub, drlsim, admission, gateway and nats-server"
	@$(call BUILD,.) -buildvcs=$(VCS) -o bin/ ./nsqd ./loaddistributor ./tbadaptor ./tools/srtm ./tools/iotpub ./tools/drlsim ./admission ./gateway
	@# what srtm up --replicated runs beside them
	@$(call BUILD,tests) -buildvcs=false -o ../bin/ github.com/nats-io/nats-server/v2
	@cd bin && du -cm nsqd loaddistributor tbadaptor srtm iotpub drlsim admission gateway nats-server | awk '{ printf "%5d MB  %s\n", $$1, $$2 == "total" ? "in all" : "bin/" $$2 }'

run: build ## run a local cluster with sensors, a console that shows it live, and a report (DURATION= PUBLISHERS= RATE= TRACE= COMPRESS= COPIES= ARGS=)
	@bin/srtm up --together $(UP_FLAGS)

# The flags of tests. No debugger reads a test program, so the linker leaves out symbols and DWARF.
TESTS = -tags=poison -shuffle=on -vet=off -ldflags=-s -timeout=$(TIMEOUT)

# The race detector makes a test several times slower. It has nothing to find in what is
# pure, which has no goroutine (archtest sees to it), and looks for faults in what is shipped:
# simulations, benches and tests of whole programs do without it themselves, and those start
# nsqd and the gateway built with it.
PURE     = $(addprefix github.com/srtm-io/srtm/,$(shell cat internal/archtest/pure.txt))
UNRACED  = $(filter $(PURE) $(addprefix github.com/srtm-io/srtm/,tools/sim/% tools/drlsim/% bench bench/% tests/%),$(ALL))
ALL      = $(filter-out %/internal/archtest,$(shell $(GO) list $(PACKAGES)))

# Tests start in the order of the command line. The longest start first, so that no processor waits at the end for
# one of them. This is the order of their times beside each other on two processors: 150 s to 14 s.
LONGEST       = $(addprefix github.com/srtm-io/srtm/,tests/faults tests/failover tests/replicated tests/hostile tests/crash tests/cluster \
	loaddistributor/controller nsqd/conn bench/convergence tests/mqtt admission/store nsqd/broker admission/server tools/srtm \
	loaddistributor/store tests/conformance tests/registration loaddistributor admission tests/publishers tests/gateway gateway/proxy \
	tests/fitting tools/srtm/up tools/load tools/srtm/calibrate tests/terminal)
longest-first = $(foreach p,$(LONGEST),$(filter $(p),$(1))) $(filter-out $(LONGEST),$(1))

# Files of tests without the race detector, in packages whose other tests have the detector. The tests count allocations
# or measure locks, which the detector changes, or they compute much in one goroutine.
LEFT_OUT = $(shell grep -rl --include='*_test.go' '^//go:build !race' admission gateway loaddistributor nsqd)

CPUS = $$(getconf _NPROCESSORS_ONLN)

# A process under the race detector sleeps a second before it ends, for the sake of
# goroutines that it leaves behind; ours leave none.
export GORACE ?= atexit_sleep_ms=0

# What tests start, built once for all of them.
PROGRAMS = build/programs

programs: no-race-note
	@mkdir -p $(PROGRAMS)
	$(GO) build -ldflags=-w -o $(PROGRAMS)/ ./nsqd ./loaddistributor ./tbadaptor ./tools/srtm ./tools/iotpub ./admission ./gateway
	for p in nsqd gateway; do $(GO) build $(RACE) -ldflags=-w -o $(PROGRAMS)/$$p-race ./$$p || exit 1; done

test: export SRTM_TEST_PROGRAMS = $(CURDIR)/$(PROGRAMS)
test: check-generated ## lint, then every test: race detector, random order, released messages poisoned
	@# linking leaves a processor idle at times, and so do the checks
	@$(MAKE) --no-print-directory programs > build/programs.out 2>&1 & programs=$$!; \
		$(MAKE) --no-print-directory $(CHECKS); failed=$$?; \
		wait $$programs || failed=$$?; cat build/programs.out; exit $$failed
	@# tests wait some of their time, and those of whole programs most of it, so more
	@# packages run at a time than there are processors
	@$(GO) test -p=$$(( 2 * $(CPUS) )) $(RACE) $(TESTS) $(call longest-first,$(filter-out $(UNRACED),$(ALL)))
	@# then the tests without the detector, and beside them the client libraries and the tests of files
	@# that the detector's build leaves out
	@($(GO) test -p=1 $(TESTS) -run="^($$(grep -hoE '^func Test\w+' $(LEFT_OUT) | cut -c 6- | paste -sd '|'))$$" $(addprefix ./,$(sort $(dir $(LEFT_OUT)))) && \
			$(CLIENTS)) > build/beside.out 2>&1 & beside=$$!; \
		$(GO) test -p=$$(( 2 * $(CPUS) )) $(TESTS) $(call longest-first,$(filter-out %/tests/clients,$(UNRACED))); failed=$$?; \
		wait $$beside || failed=$$?; cat build/beside.out; exit $$failed

check: lint ## lint and the unit tests, without the race detector, clusters and client libraries: for between two commits
	@# most of their time they wait, so more packages run at a time than there are processors
	@$(GO) test -p=$$(( 2 * $(CPUS) )) $(TESTS) $(filter-out %/internal/archtest %/tools/srtm/up,$(shell $(GO) list ./...))

race: no-race-note ## every test under the race detector COUNT times, without lint
	@# a loop, since a Ginkgo suite runs once in a process
	@for i in $$(seq $(COUNT)); do $(GO) test $(RACE) -tags=poison -shuffle=on -timeout=$(TIMEOUT) -count=1 $(PACKAGES) || exit 1; done

no-race-note:
	@$(if $(RACE),:,echo "no C compiler found: running the tests WITHOUT the race detector")

# What lint checks, apart from generated code, which it generates again.
CHECKS = fmt vet staticcheck tidy archtest

lint: check-generated $(CHECKS) ## all static checks

fmt: ## fail on files that gofmt would change
	@files=$$("$$($(GO) env GOROOT)/bin/gofmt" -l .) && if [ -n "$$files" ]; then echo "gofmt would change:"; echo "$$files"; exit 1; fi

vet: ## go vet
	$(GO) vet $(PACKAGES)

staticcheck: ## staticcheck, the version pinned in go.mod
	$(GO) tool staticcheck $(PACKAGES)

# The kernel program's objects are committed, since nothing here needs clang
# but this. They are regenerated where the exact compiler is found.
BPF := $(shell command -v clang-14 >/dev/null && command -v llvm-strip-14 >/dev/null && [ -f /usr/include/bpf/bpf_helpers.h ] && [ -d kernel/bpf ] && echo yes)

generate: ## regenerate the Go of api/, docs/flags.md and, with clang 14, kernel/bpf
	$(GO) run ./internal/generate
	$(if $(BPF),$(GO) generate ./kernel/bpf/...,@echo "no clang-14 with libbpf's headers: kernel/bpf left as it is")

# The state of generated code, a line for each file. Uncommitted work there is
# fine as long as generating again would not change it.
GENERATED = find api docs/flags.md $(if $(BPF),kernel/bpf) -type f | LC_ALL=C sort | while read -r f; do echo "$$(git hash-object --no-filters "$$f") $$f"; done

check-generated: ## fail when generated code is stale, edited, or left over
	@mkdir -p build && ( $(GENERATED) ) > build/generated.before
	@$(MAKE) --no-print-directory generate
	@( $(GENERATED) ) > build/generated.after
	@diff build/generated.before build/generated.after || { echo "generated code was stale (<) and has been regenerated (>): commit it"; exit 1; }
	@find api -name '*.pb.go' | while read -r f; do \
		proto=$$(echo "$$f" | sed -E 's/(_grpc)?\.pb\.go$$/.proto/'); \
		[ -f "$$proto" ] || { echo "$$f is left over: there is no $$proto"; exit 1; }; \
	done

# Only a difference is a failure: without a network, tidy cannot look at what
# other modules' tests need and says so on standard error.
tidy: ## fail when a go.mod or go.sum is not tidy
	@mkdir -p build; for module in $(MODULES); do \
		GOWORK=off $(GO) -C $$module mod tidy -diff > build/tidy.diff 2> build/tidy.err && continue; \
		if [ -s build/tidy.diff ]; then cat build/tidy.diff; echo "$$module/go.mod or go.sum is not tidy: run GOWORK=off go mod tidy there"; exit 1; fi; \
		echo "go mod tidy could not tell of $$module:"; tail -n 3 build/tidy.err; \
	done

console-assets: ## fetch the scripts that the console embeds again, by version and hash (needs npm)
	console/fetch-assets.sh

conformance: no-race-note ## raw bytes against our nsqd and NSQ's own, or another (SRTM_CONFORMANCE_NSQD=path)
	$(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) ./tests/conformance

# The suite of the results in docs/mqtt-conformance.md.
SUITE_COMMIT = 9d7bb80bb8b9d9cfc0b52f8cb4c1916401281103
SUITE        = build/paho.mqtt.testing

build/paho.mqtt.testing:
	rm -rf $@.new && git init -q $@.new
	git -C $@.new fetch -q --depth=1 https://github.com/eclipse/paho.mqtt.testing $(SUITE_COMMIT)
	git -C $@.new checkout -q FETCH_HEAD && mv $@.new $@

mqtt-conformance: $(SUITE) ## Eclipse paho's interoperability suite of MQTT against nsqd (SUITE=folder of the suite)
	SRTM_MQTT_SUITE=$(abspath $(SUITE)) $(GO) test -count=1 -timeout=$(TIMEOUT) -parallel=4 -v -run=InteroperabilitySuite ./tests/mqtt

# Most of their time they wait, so more of them run at a time than there are
# processors. The whole log is shown when something fails.
CLIENTS = mkdir -p build && if SRTM_CLIENTS=1 $(GO) test -count=1 -timeout=$(TIMEOUT) -parallel=8 -v ./tests/clients > build/clients.log 2>&1; \
	then grep '^clients: ' build/clients.log; else cat build/clients.log; exit 1; fi

test-clients: ## install NSQ client libraries into the user's cache folder and drive them against nsqd (log: build/clients.log)
	@$(CLIENTS)

soak: ## load a broker for DURATION (10m), and look for what it does not give back
	SRTM_SOAK=$(or $(DURATION),10m) $(GO) test -count=1 -timeout=24h -v -run='^TestSoakLeaksNothing$$' ./tests/crash

trouble: ## what PUBLISHERS (200) notice of a drain, a move, a crash and a return (BIN= the folder of other daemons)
	SRTM_TROUBLE=$(or $(PUBLISHERS),200) SRTM_FAILOVER_BIN=$(abspath $(BIN)) $(GO) test -count=1 -timeout=10m -v -run='^TestMeasureFailureEffects$$' ./tests/failover

stress: ## restart with a backlog of BACKLOG (1000000) messages, and 10,000 connections at once
	SRTM_CRASH_BACKLOG=$(or $(BACKLOG),1000000) SRTM_CRASH_CONNECTIONS=10000 $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run='^Test(RestartWithABacklog|ManyConnectionsAtOnce)$$' ./tests/crash

faults: ## a cluster under kills, stops, partitions, drains, updates, deletions and two adaptors for DURATION (2m, half for each place of the adaptor), its contract checked; each link cut in each direction; clocks too fast and stepped; admission killed at each step, and cut off
	SRTM_FAULTS=$(if $(DURATION),$(DURATION),2m) $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run=Whatever ./tests/faults
	SRTM_FAULTS=1 $(GO) test -count=1 -timeout=1h -v -run='Partitions|Clocks' ./tests/faults
	SRTM_FAULTS=1 $(GO) test -count=1 -timeout=$(TIMEOUT) -parallel=6 -v -run=TestKills ./admission/store
	SRTM_FAULTS=1 $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run=ServersApart ./admission

chaos-replicated: ## brokers, brokers with their disks, and servers of NATS killed for DURATION (10m) at twice the contract of a replicated topic, every history judged
	SRTM_CHAOS=$(or $(DURATION),10m) $(GO) test -count=1 -timeout=24h -v -run='^TestChaosLosesNoAcknowledgedMessage$$' ./tests/replicated

# A commit that is no release is before it: 0.2.0~123.gabc1234.
PACKAGE_VERSION = $(shell release=$$(sed -n 's/^const Release = "\(.*\)"/\1/p' internal/program/version.go); \
	git describe --exact-match --match "v$$release" HEAD >/dev/null 2>&1 && echo $$release || \
	echo "$$release~$$(git rev-list --count HEAD 2>/dev/null || echo 0).g$$(git rev-parse --short HEAD 2>/dev/null || echo 0)")

test-deploy: ## the Helm chart, the compose file, the Dockerfile and the alerts, by the engines of those who read them
	GOWORK=off $(GO) -C tests/charts vet ./...
	GOWORK=off $(GO) -C tests/charts test -count=1 ./...

packages: build ## the .deb and .rpm of this commit, into build/packages (GOARCH=)
	@rm -rf build/packages && mkdir -p build/packages
	@# nfpm runs here, for whatever processor it packs
	@nfpm=$$(env -u GOARCH GOWORK=off $(GO) -C deploy tool -n nfpm) && cd deploy && for kind in deb rpm; do \
		VERSION='$(PACKAGE_VERSION)' GOARCH=$$($(GO) env GOARCH) BIN=../bin $$nfpm package --packager $$kind --target ../build/packages/ || exit 1; \
	done

release-packages: ## the .deb and .rpm for amd64 and arm64, into build/packages
	@for arch in arm64 amd64; do $(MAKE) --no-print-directory packages GOARCH=$$arch PACKAGE_VERSION='$(PACKAGE_VERSION)' && mkdir -p build/$$arch && mv build/packages/* build/$$arch/ || exit 1; done
	@mkdir -p build/packages && mv build/amd64/* build/arm64/* build/packages/ && rmdir build/amd64 build/arm64

# goreleaser brings 700 modules, so it is pinned here and not in a go.mod.
GORELEASER = $(GO) run github.com/goreleaser/goreleaser/v2@v2.16.0

release-notes: ## print the section of CHANGELOG.md about the release
	@awk -v release="$$(sed -n 's/^const Release = "\(.*\)"/\1/p' internal/program/version.go)" \
		'/^## / { on = $$2 == release; next } on' CHANGELOG.md

release-check: ## check .goreleaser.yaml with goreleaser
	$(GORELEASER) check

# goreleaser runs syft, which writes the bills of materials. syft brings 270 modules, so it is pinned here, too.
build/tools/syft:
	GOBIN=$(CURDIR)/build/tools GOWORK=off $(GO) install github.com/anchore/syft/cmd/syft@v1.57.1

release-snapshot: build/tools/syft ## build what a release has, without the image, into dist/; publish nothing
	PATH=$(CURDIR)/build/tools:$$PATH $(GORELEASER) release --snapshot --clean --skip=docker

test-packages: packages ## install, run, upgrade, remove and purge the packages in a folder of their own (needs root and dpkg)
	SRTM_PACKAGES=$(CURDIR)/build/packages $(GO) test -count=1 -timeout=$(TIMEOUT) -v ./tests/deploy

test-image: ## build the image, run a broker and the compose file's cluster from it (needs root; installs buildah, podman and runc from Debian)
	SRTM_IMAGE=1 $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run=TestImage ./tests/deploy

test-units: packages ## the units of the .deb under systemd: start, kill, restart, upgrade, remove (needs root; makes a Debian in build/)
	SRTM_UNITS=$(CURDIR)/build/packages $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run=UnderSystemd ./tests/deploy

test-install: ## go install of every command, from a fresh module cache
	SRTM_INSTALL=1 $(GO) test -count=1 -timeout=$(TIMEOUT) -v -run=TestInstall ./tests/deploy

archtest: ## the import and purity rules
	$(GO) test -count=1 ./internal/archtest

FUZZ_TARGETS = grep -rnoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . | grep -v /testdata/ | sed -E 's|^(.*)/[^/]*:[0-9]+:func |\1 |' | LC_ALL=C sort

fuzz: ## fuzz every target for FUZZTIME (60s)
	@$(FUZZ_TARGETS) | while read -r dir target; do \
		echo "$$dir $$target"; \
		$(GO) test -run='^$$' -fuzz="^$$target$$" -fuzztime=$(FUZZTIME) "$$dir" || exit 1; \
	done

fuzz-short: ## fuzz every target for 5 seconds
	@$(MAKE) --no-print-directory fuzz FUZZTIME=5s

# Upstream's nsqd is built from the module that tests/go.mod pins. Other brokers take part in
# the comparison where they are installed. docs/performance.md has all.
UPSTREAM = build/upstream/nsqd
PEERS   ?= --nsq=upstream=$(UPSTREAM)

upstream: ## NSQ's own nsqd, nsqlookupd and nsqadmin, into build/upstream
	@mkdir -p build/upstream
	GOWORK=off CGO_ENABLED=0 $(GO) build -C tests -trimpath -o ../build/upstream/ $(addprefix github.com/nsqio/nsq/apps/,nsqd nsqlookupd nsqadmin)

# The command of all measurements: build/bench SCENARIO, build/bench --help. The floor is a
# program of its own: its memory is measured.
build/bench:
	@mkdir -p build
	@$(GO) build -o build/ ./bench ./bench/floor

bench: build upstream build/bench ## run every benchmark (BENCHTIME=1x COUNT=1), and ours beside other brokers (PEERS=)
	build/bench peer --rounds=1 --duration=3s --loaddistributor=bin/loaddistributor --nats=bin/nats-server --json=build/peers.json $(PEERS)
	$(GO) test -run='^$$' -bench=. -benchmem -benchtime=$(BENCHTIME) -count=$(COUNT) -timeout=$(TIMEOUT) $(PACKAGES)

bench-full: build upstream build/bench ## ours beside other brokers in every scenario, into docs/performance/peers.md: 25 minutes (PEERS=, ARGS=)
	build/bench peer --set=full --floor=build/floor --nats=bin/nats-server --json=build/peers.json --markdown=docs/performance/peers.md $(PEERS) $(ARGS)

bench-mqtt: build build/bench ## ours with MQTT beside mosquitto and nats-server, into docs/performance/mqtt.md: 3 minutes (ARGS=)
	build/bench peer --mqtt --only=srtm-mqtt,floor-mqtt,nats-mqtt,mosquitto --scenarios=poisson-1000,poisson-4000,idle --floor=build/floor --nats=bin/nats-server --json=build/mqtt.json --markdown=docs/performance/mqtt.md $(ARGS)

scaling: build build/bench ## what event loops are worth on this machine, into docs/performance/scaling.md: 2 minutes (ARGS=)
	build/bench scaling --nsqd bin/nsqd $(ARGS) > build/scaling.md
	mv build/scaling.md docs/performance/scaling.md

scale: build build/bench ## the control plane with 10,000 topics and with a million publishers, into docs/performance/control-plane.md: 5 minutes (ARGS=)
	build/bench scale $(ARGS) > build/control-plane.md
	mv build/control-plane.md docs/performance/control-plane.md

bench-replicated: build upstream build/bench ## memory, fsync, replicated, JetStream itself and upstream, into docs/performance/replicated.md: 6 minutes
	build/bench replicated --upstream=$(UPSTREAM) $(ARGS) > build/replicated.md
	mv build/replicated.md docs/performance/replicated.md

bench-admission: build build/bench ## admission's decisions beside bare servers, Redis, nginx and HAProxy: 2 minutes (ARGS=)
	@build/bench admission $(ARGS)

bench-gateway: build build/bench ## the gateway beside a bare reverse proxy, HAProxy, nginx and Apache: 4 minutes (ARGS=)
	@build/bench gateway $(ARGS)

convergence: build/bench ## the paper's Table 1 with real processes, into build/convergence.json: half an hour on an idle machine (ARGS=)
	@mkdir -p build/paced
	@$(GO) build -tags=paced -o build/paced/ ./nsqd ./loaddistributor ./tbadaptor ./tools/iotpub
	@build/bench convergence --json=build/convergence.json $(ARGS)

# ONLY names some figures (go run ./bench figures --help lists them), SEED decides
# everything random in those that are simulated, TRACES is the recorded traffic.
SEED   ?= 1
TRACES ?= ../shared/traces

figures: build build/bench ## the figures of the paper and beyond, into docs/evaluation: about an hour on an idle machine, most of it for what is live (ONLY= SEED= TRACES=)
	@build/bench figures --seed=$(SEED) --traces=$(TRACES) $(if $(ONLY),--only=$(ONLY))

cover: ## test coverage over all packages, into build/cover.out
	@mkdir -p build
	$(GO) test -coverpkg=./... -coverprofile=build/cover.out -timeout=$(TIMEOUT) $(PACKAGES) > build/cover.log || { cat build/cover.log; exit 1; }
	@$(GO) tool cover -func=build/cover.out | tail -n 1

clean: ## remove bin/ and build/
	rm -rf bin build
