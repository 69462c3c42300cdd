# fairlead: few verbs. `make help` lists them.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export CGO_ENABLED := 0
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS     := -s -w -X github.com/fairlead/fairlead/internal/cli/base.Version=$(VERSION)
SHIM        := internal/runner/shim/embedded/fairlead-shim
KUBECTL     := $(CURDIR)/bin/kubectl
TOOL        := go tool -modfile=$(CURDIR)/tools/go.mod
LINT        := $(TOOL) golangci-lint
MUTATE      ?= alloc epslice placement table workloads zone
UNIT        := . ./internal/svc/... ./internal/alloc/... ./internal/epslice/... ./internal/placement/... ./internal/workloads/... ./internal/table/... ./internal/zone/... ./internal/env/...

# CLUSTERS start many processes: two packages keep 2 processors busy, and more miss their deadlines. GUESTS run in User Mode
# Linux, one after the other, for a guest takes a whole processor. HEAVY are the longest of the others, the longest first; a
# package runs two tests at once, for three beside a guest miss deadlines. Compilers and linkers, two fifths of the work, give way to
# running tests. Less garbage collection is a tenth of all processor time. The cache of results does not know the programs that
# tests start. go vet has run by then with all of its analyzers; go test would ask it for some of them again. A hundred
# programs are linked, without what only a debugger reads.
MODULE      := github.com/fairlead/fairlead
CLUSTERS    := $(addprefix $(MODULE)/,test/node test/servers test test/reliability test/packages)
GUESTS      := $(addprefix $(MODULE)/,test/ipvs internal/dataplane/ipvs internal/runner/guest test/ipv4 internal/testbed/uml \
  internal/kernel/ipvs internal/kernel/ipset internal/kernel/cgroup)
HEAVY       := $(addprefix $(MODULE)/,test/lb internal/apiserver internal/dataplane/iptables internal/controller \
  deploy/kubernetes internal/runner internal/proxy internal/lb/proxied/web internal/dataplane/nft \
  internal/dataplane/connecttime internal/lb/controller internal/registry/service internal/cli)
COMPILE     = list -export -deps >/dev/null
FETCH_CONFORMANCE = go -C test/conformance $(COMPILE) sigs.k8s.io/gateway-api/conformance/echo-basic ./client && \
  go -C test/conformance $(COMPILE) -test . && go -C bench/peers/coredns $(COMPILE) .
GOTEST      := go test -toolexec 'nice -n 19' -count=1 -json -vet=off -ldflags='-s -w' -timeout 40m

.PHONY: help build bpf demo test test-unit bench conformance check mutate fmt generate clean setup fetch kubectl wireguard-go test-apiserver release image soak kube-proxy guest-test migrate-test kubernetes-test
help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: ## make bin/fairlead (static, no cgo)
	go build -trimpath -ldflags '-s -w' -o $(SHIM) ./cmd/fairlead-shim
	go build -tags embed_shim -ldflags '$(LDFLAGS)' -o bin/ ./cmd/fairlead ./examples/backend

demo: setup build kubectl ## start two nodes and a client in namespaces, apply examples/my-service.yaml, print what was measured
	go run ./test/demo --bin bin --manifest examples/my-service.yaml

test: setup build kubectl wireguard-go test-apiserver kube-proxy fetch ## the whole suite, with set-up
	go vet ./...
	go build -o bin/ ./test/summary
	export FAIRLEAD_KUBECTL=$(KUBECTL) FAIRLEAD_BIN=$(CURDIR)/bin GOGC=300; \
	others=$$(comm -23 <(go list ./... | sort) <(printf '%s\n' $(CLUSTERS) $(GUESTS) $(HEAVY) | sort)); \
	clusters=$$(mktemp -u); \
	bin/summary <({ $(GOTEST) -p 2 -parallel 1 $(CLUSTERS) || :; touch $$clusters; $(GOTEST) -p 2 -parallel 2 $(HEAVY) $$others || :; }) \
	  <(until [ -e $$clusters ]; do sleep 1; done; rm $$clusters; $(GOTEST) -p 1 $(GUESTS) || :)

soak: setup build ## ten minutes of kills and partitions of three servers and five nodes
	FAIRLEAD_BIN=$(CURDIR)/bin go test ./test/reliability -v -run TestFaults -count=1 -timeout 30m -args -soak 10m -seed $$RANDOM

test-unit: ## the pure rooms: no root, no set-up, under a minute
	go test $(UNIT)

kube-proxy: ## make bench/bin/kube-proxy and bench/bin/coredns, the real ones, from their published modules
	$(MAKE) -C bench bin/kube-proxy bin/coredns

guest-test: setup build kube-proxy ## what runs in User Mode Linux, also the clusters that 'make test' skips where a guest is slow
	FAIRLEAD_SLOW_GUESTS=1 FAIRLEAD_BIN=$(CURDIR)/bin go test -v -p 1 -count=1 -vet=off -timeout 60m $(GUESTS)

migrate-test: setup build kubectl test-apiserver kube-proxy ## the way from the real kube-proxy, CoreDNS and MetalLB to fairlead and back, and drains; for figures: QUESTIONS=1000000, REPLACEMENTS=200, RATE=2000
	$(MAKE) -C bench bin/kube-prestop
	$(if $(QUESTIONS),FAIRLEAD_TEST_QUESTIONS=$(QUESTIONS)) $(if $(RATE),FAIRLEAD_TEST_RATE=$(RATE)) \
	$(if $(REPLACEMENTS),FAIRLEAD_TEST_REPLACEMENTS=$(REPLACEMENTS)) \
	FAIRLEAD_KUBECTL=$(KUBECTL) FAIRLEAD_BIN=$(CURDIR)/bin go test ./deploy/kubernetes -v -count=1 -timeout 120m \
	  -run '(TestMigrate|TestMigrateBGP|TestMigrateQuestions|TestDrain)$$'

# The packages whose tests only need an API, or run the manifests, the chart and migrations.
kubernetes-test: setup build kubectl test-apiserver kube-proxy ## tests of what runs on a real Kubernetes, on the real kube-apiserver, controllers and scheduler; MINOR=1.35 and 1.36 choose older ones
	go -C test/helm $(COMPILE) helm.sh/helm/v3/cmd/helm
	go -C test/hubble $(COMPILE) github.com/cilium/cilium/hubble
	go -C test/metallb $(COMPILE) go.universe.tf/metallb/speaker go.universe.tf/metallb/controller
	$(FETCH_CONFORMANCE)
	$(MAKE) -C bench bin/kube-prestop $(if $(MINOR),bin/$(MINOR)/kubernetes,\
	  $(addprefix bin/,etcd kube-apiserver kube-controller-manager kube-scheduler))
	FAIRLEAD_KUBERNETES=$(CURDIR)/bench/bin$(if $(MINOR),/$(MINOR)) FAIRLEAD_KUBECTL=$(KUBECTL) FAIRLEAD_BIN=$(CURDIR)/bin \
	go test -p 1 -v -count=1 -timeout 60m ./deploy/... ./internal/election ./internal/lb/v1

conformance: setup build ## the conformance tests of the Gateway API, as 'make test' runs them, with reports, and the experimental channel
	$(FETCH_CONFORMANCE)
	FAIRLEAD_BIN=$(CURDIR)/bin go test ./test/lb -v -run 'TestGatewayConformance|TestMeshConformance' -count=1 -timeout 60m -args \
	  -conformance-report $(CURDIR)/bin/conformance.yaml \
	  -mesh-report $(CURDIR)/bin/mesh-conformance.yaml -mesh-log $(CURDIR)/bin/mesh-conformance.log \
	  -conformance-log $(CURDIR)/bin/conformance.log -conformance-version $(VERSION)
	FAIRLEAD_BIN=$(CURDIR)/bin go test ./test/lb -v -run TestGatewayConformance -count=1 -timeout 20m -args \
	  -conformance-profiles GATEWAY-HTTP -conformance-channel experimental -conformance-run HTTPRouteRetry \
	  -conformance-log $(CURDIR)/bin/conformance-experimental.log

bench: build ## measure against the peers; bench/README.md says what to expect
	$(MAKE) -C bench

check: ## gofmt, goimports, vet, golangci-lint, generated code up to date
	@bad=$$(git ls-files '*.go' | xargs gofmt -l); [ -z "$$bad" ] || { echo "not gofmt'd: $$bad" >&2; exit 1; }
	$(LINT) fmt --diff .
	go vet ./...
	$(LINT) run ./...
	$(MAKE) generate && git diff --exit-code --stat

mutate: ## hold the tests of the pure rooms against mutants: minutes, no root
	for room in $(MUTATE); do $(TOOL) gremlins unleash --workers 2 --timeout-coefficient 10 ./internal/$$room; done

fmt: ## gofmt, and imports in three groups: standard library, third party, this module
	$(LINT) fmt .

generate: ## write the generated code anew; that of BPF where clang-14 and llvm-strip-14 are there
	go generate ./...
	if command -v clang-14 && command -v llvm-strip-14; then $(MAKE) bpf; else echo "no clang-14 or llvm-14 here: BPF programs are left as they are"; fi

kubectl: ## make bin/kubectl from its published module
	cd test/kubectl && go build -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2' -o $(KUBECTL) .

test-apiserver: ## make bin/apiserver: the API server on its own, for tests of rooms that need an API
	go build -ldflags '-s -w' -o bin/ ./test/apiserver

wireguard-go: ## make bin/wireguard-go, for kernels without WireGuard, from its published module
	cd test/wireguard && go build -ldflags '-s -w' -o $(CURDIR)/bin/wireguard-go golang.zx2c4.com/wireguard

setup: ## install the Debian packages that tests and demo use, when root
	@test/setup.sh

# What is compiled here is only linked there: the programs are built once.
fetch: ## download and compile what tests build themselves: their namespaces have no network
	go -C test/pebble $(COMPILE) github.com/letsencrypt/pebble/v2/cmd/pebble
	go -C test/browser $(COMPILE) .
	go -C test/helm $(COMPILE) helm.sh/helm/v3/cmd/helm
	go -C test/hubble $(COMPILE) github.com/cilium/cilium/hubble
	go -C test/otlp $(COMPILE) .
	go -C test/metallb $(COMPILE) go.universe.tf/metallb/speaker go.universe.tf/metallb/controller
	$(FETCH_CONFORMANCE)
	go -C test/h2spec $(COMPILE) github.com/summerwind/h2spec/cmd/h2spec
	go -C bench/peers/s3 $(COMPILE) .
	go $(COMPILE) -modfile=tools/go.mod github.com/cilium/ebpf/cmd/bpf2go
	go -C tools/release $(COMPILE) ./sbom ./image
	go tool -modfile=tools/release/go.mod nfpm --version >/dev/null

release: ## packages, tarballs, a container image, SBOMs and checksums for amd64 and arm64, in dist/
	LDFLAGS='$(LDFLAGS)' tools/release/all

image: ## the container image for amd64 and arm64, an OCI archive with SBOMs, in dist/
	LDFLAGS='$(LDFLAGS)' FORMATS=image tools/release/all

clean: ## remove what was built
	rm -rf bin dist $(SHIM)

bpf: ## compile the BPF programs: clang-14 and llvm-14 of Debian 12; a test compares
	cd internal/kernel/connect && GOPACKAGE=connect $(TOOL) bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel \
	  -cflags '-O2 -g -Wall -Werror -mcpu=v3' -type front_key -type front -type slot_key -type block -type endpoint -type own_key \
	  -type member_key -type client -type connected \
	  $(BPFFLAGS) program bpf/connect.c
