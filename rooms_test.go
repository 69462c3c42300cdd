package fairlead_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/fairlead/fairlead/"

// rooms is the level of every package below internal/. A room imports only
// rooms of a lower level. A package below a listed one belongs to its room unless
// it is listed itself.
var rooms = map[string]int{
	"apiclient":                     0,
	"apiserver/clientlog":           0,
	"apiserver/documents":           0,
	"apiserver/listen":              0,
	"apiserver/openapi":             0,
	"apiserver/space":               0,
	"backup":                        0,
	"corefile":                      0,
	"env":                           0,
	"events":                        0,
	"clientmetrics":                 0,
	"kubeproxyconfig":               0,
	"gateway/api":                   0,
	"gateway/policy":                0,
	"gateway/hostpath":              0,
	"gateway/kinds":                 1,
	"gateway/counted":               0,
	"gateway/parents":               1,
	"gateway/services":              0,
	"gateway/basic":                 1,
	"gateway/names":                 1,
	"gateway/static":                1,
	"lb/proxied/budget":             0,
	"lb/proxied/envoyauth":          0,
	"lb/proxied/http1":              0,
	"lb/proxied/proxyproto":         0,
	"lb/acme/nsupdate":              0,
	"lb/quorum":                     0,
	"lb/v1":                         0,
	"loop":                          0,
	"peers":                         0,
	"placement":                     0,
	"reflector":                     0,
	"runner/logfile":                0,
	"runner/probe":                  0,
	"runner/values":                 0,
	"svc":                           0,
	"tracing":                       0,
	"migrate/coredns/compare":       0,
	"hubble/api":                    0,
	"trace/request":                 0,
	"lb/proxied/compress":           1,
	"lb/proxied/mark":               1,
	"alloc":                         1,
	"apiserver/watch":               1,
	"barrier":                       1,
	"cli/base":                      1,
	"dialect":                       1,
	"dns/membership":                1,
	"dns/plugin":                    1,
	"epslice":                       1,
	"gateway/filter":                1,
	"gateway/trust":                 1,
	"kernel":                        1,
	"lb/logship":                    1,
	"lb/owners":                     1,
	"lb/kubevip":                    3,
	"gateway/certificates":          1,
	"lb/pool":                       1,
	"lb/proxied/panics":             1,
	"lb/proxied/traffic":            1,
	"lb/witness":                    1,
	"migrate":                       1,
	"podspec":                       1,
	"table":                         1,
	"workloads":                     1,
	"zone":                          1,
	"lb/bfd":                        1,
	"migrate/coredns":               1,
	"hubble":                        1,
	"hubble/seen":                   1,
	"apiserver/pki":                 2,
	"checks":                        2,
	"cli/config":                    2,
	"controller/kit":                2,
	"dataplane":                     2,
	"dataplane/kubeproxy":           2,
	"dns/feed":                      2,
	"election":                      2,
	"gateway":                       2,
	"gateway/fronts":                2,
	"lb/acme":                       2,
	"lb/announce":                   2,
	"lb/bgp":                        2,
	"lb/claim":                      2,
	"lb/filter":                     2,
	"lb/proxied/accesslog":          2,
	"lb/proxied/pages":              2,
	"lb/proxied/authz":              2,
	"lb/proxied/pods":               2,
	"lb/proxied/stream":             2,
	"offline":                       2,
	"registration":                  2,
	"runner/drain":                  2,
	"runner/podnet":                 2,
	"runner/shim":                   2,
	"runner/static":                 2,
	"servers":                       2,
	"systemd":                       2,
	"migrate/act":                   2,
	"nexthop":                       2,
	"migrate/walk":                  3,
	"agent":                         3,
	"apiserver/join":                3,
	"apiserver/rotation":            3,
	"cli/lifecycle":                 3,
	"controller/garbage":            3,
	"controller/sched":              3,
	"controller/selection":          3,
	"gateway/loops":                 3,
	"gateway/watch":                 3,
	"dataplane/iptables":            3,
	"dataplane/ipvs":                3,
	"dataplane/nft":                 3,
	"dataplane/userspace":           3,
	"dns":                           3,
	"dns/chain":                     3,
	"explain":                       3,
	"explain/routes":                3,
	"flows":                         3,
	"lb/controller":                 3,
	"lb/metallb":                    3,
	"lb/proxied":                    3,
	"lb/proxied/http2":              3,
	"lb/proxied/muxes":              4,
	"lb/routes":                     3,
	"lb/wire":                       3,
	"preflight":                     3,
	"prestop":                       3,
	"proxy":                         3,
	"registry":                      3,
	"runner/confinement":            3,
	"runner/program":                3,
	"migrate/coredns/walk":          3,
	"hubble/capture":                3,
	"hubble/relay":                  3,
	"hubble/tunnel":                 3,
	"trace":                         4,
	"dataplane/connecttime":         4,
	"dataplane/handover":            4,
	"apiserver/accounts":            4,
	"apiserver/members":             4,
	"apiserver/serve":               4,
	"apiserver/usage":               4,
	"migrate/nodecheck":             4,
	"migrate/drain":                 4,
	"cli/client/asking":             4,
	"cli/client/asnode":             4,
	"cli/client/lbview":             4,
	"controller/endpoints":          4,
	"controller/nodes":              4,
	"controller/programmed":         4,
	"controller/sets":               4,
	"gateway/controller":            4,
	"lb/front":                      4,
	"lb/proxied/heads":              4,
	"lb/proxied/web":                5,
	"runner/status":                 4,
	"runner/volumes":                4,
	"migrate/metallb":               4,
	"migrate/metallb/walk":          5,
	"trace/follow":                  5,
	"apiserver/certs":               5,
	"apiserver/store":               5,
	"cli/client/pods":               5,
	"controller":                    5,
	"lb/speaker":                    5,
	"runner/pod":                    5,
	"runner/registered":             5,
	"apiserver/access":              6,
	"apiserver/backend":             6,
	"cli/client":                    6,
	"lb":                            6,
	"runner/api":                    6,
	"apiserver/admit":               7,
	"apiserver/custom":              7,
	"cli/client/migratecmd":         7,
	"cli/parts":                     7,
	"runner":                        7,
	"apiserver":                     8,
	"cli/kubeproxy":                 8,
	"cli/client/explaincmd":         9,
	"cli/client/explaincmd/effects": 8,
	"cli/client/explaincmd/listing": 2,
	"cli/client/explaincmd/served":  8,
	"cli/node":                      9,
	"cli/host":                      10,
	"cli/client/status":             10,
	"ui":                            11,
	"cli/client/uicmd":              12,
	"cli/daemon":                    12,
	"cli":                           13,
}

// testOnly are rooms that only _test.go files and other testOnly rooms may
// import.
var testOnly = map[string]bool{
	"testbed": true, "controller/kittest": true, "lb/proxied/lbtest": true, "testbed/arp": true, "testbed/bird": true, "testbed/etcd": true,
	"testbed/flows": true, "testbed/nszone": true, "testbed/pebble": true, "testbed/process": true, "testbed/questions": true,
	"testbed/systemd": true, "testbed/uml": true,
}

// libraries restricts who may import what touches the outside world.
var libraries = []struct {
	prefix, why string
	allowed     []string
}{
	{"k8s.io/kubernetes", "the peers live in bench/", nil},
	{"github.com/vishvananda/netlink", "netlink belongs to kernel", []string{"kernel", "testbed"}},
	{"github.com/vishvananda/netns", "namespaces belong to kernel", []string{"kernel", "testbed"}},
	{"golang.org/x/sys/unix", "system calls belong to kernel", []string{"kernel", "testbed"}},
	{"github.com/cilium/ebpf", "BPF belongs to kernel", []string{"kernel"}},
	{"github.com/osrg/gobgp/v4", "BGP belongs to lb/bgp", []string{"lb/bgp"}},
	{"github.com/minio/minio-go/v7", "S3 belongs to lb/logship", []string{"lb/logship"}},
	{"k8s.io/endpointslice", "a second opinion for tests only", []string{}},
}

// plainSyscall is what a room outside of kernel may use of package syscall: error
// numbers and signals, to compare with, and what other packages of the standard
// library take or return (os/exec, net). All else is a system call, or a number of
// one that differs between architectures.
var plainSyscall = regexp.MustCompile(`^(E[A-Z0-9]+|Errno|SIG[A-Z0-9]+|Signal|WaitStatus|` +
	`SysProcAttr|SysProcIDMap|Credential|RawConn|CLONE_NEW[A-Z]+)$`)

// checkSyscalls reports what a file outside of kernel uses of package syscall.
func checkSyscalls(t *testing.T, path string, f *ast.File) {
	t.Helper()
	ast.Inspect(f, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == "syscall" && !plainSyscall.MatchString(sel.Sel.Name) {
			t.Errorf("%s: syscall.%s: system calls belong to kernel", path, sel.Sel.Name)
		}
		return true
	})
}

func TestRoomsImportOnlyDownwards(t *testing.T) {
	seen := 0
	err := filepath.WalkDir("internal", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		seen++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(strings.TrimPrefix(filepath.Dir(path), "internal/"))
		from, level, known := roomOf(dir)
		if !known && !testOnly[dir] {
			t.Errorf("%s: internal/%s is in no room; give it a level in the table above", path, dir)
			return nil
		}
		isTest := strings.HasSuffix(path, "_test.go") || testOnly[dir]
		if from != "kernel" && !isTest {
			checkSyscalls(t, path, f)
		}
		for _, spec := range f.Imports {
			imp, _ := strconv.Unquote(spec.Path.Value)
			checkLibrary(t, path, from, imp, isTest)
			to, ok := strings.CutPrefix(imp, module+"internal/")
			if !ok {
				continue
			}
			if testOnly[to] {
				if !isTest {
					t.Errorf("%s imports the test room %s", path, to)
				}
				continue
			}
			target, toLevel, ok := roomOf(to)
			switch {
			case !ok:
				t.Errorf("%s imports %s, which is in no room", path, imp)
			case target == from || isTest:
			case toLevel >= level:
				t.Errorf("%s: room %s (level %d) imports %s (level %d); imports go downwards only", path, from, level, target, toLevel)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Fatalf("only %d files seen: the walk does not look where the code is", seen)
	}
}

// What the tables above name exists: a rule about nothing misleads.
func TestRoomsAndLibrariesExist(t *testing.T) {
	for room := range rooms {
		if files, _ := filepath.Glob(filepath.Join("internal", room, "*")); len(files) == 0 {
			t.Errorf("room %s has no directory", room)
		}
	}
	for room := range testOnly {
		if files, _ := filepath.Glob(filepath.Join("internal", room, "*.go")); len(files) == 0 {
			t.Errorf("test room %s has no directory", room)
		}
	}
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range libraries {
		if l.allowed == nil { // forbidden everywhere
			continue
		}
		found := false
		for m := range strings.Lines(string(mod)) {
			f := strings.Fields(m)
			found = found || len(f) > 1 && strings.HasPrefix(l.prefix+"/", f[0]+"/")
		}
		if !found {
			t.Errorf("library %s is not in go.mod", l.prefix)
		}
	}
}

func checkLibrary(t *testing.T, path, from, imp string, isTest bool) {
	t.Helper()
	for _, l := range libraries {
		if imp != l.prefix && !strings.HasPrefix(imp, l.prefix+"/") {
			continue
		}
		ok := isTest && l.allowed != nil
		for _, a := range l.allowed {
			ok = ok || from == a || strings.HasPrefix(from, a+"/")
		}
		if !ok {
			t.Errorf("%s imports %s: %s", path, imp, l.why)
		}
	}
}

// roomOf returns the listed room that dir is or lies in.
func roomOf(dir string) (string, int, bool) {
	for d := dir; d != "." && d != ""; d = filepath.Dir(d) {
		if level, ok := rooms[d]; ok {
			return d, level, true
		}
	}
	return "", 0, false
}

// Every direct dependency is a decision that docs/dependencies.md explains.
func TestDirectDependenciesAreExplained(t *testing.T) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("docs/dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	direct := regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(string(mod), -1)
	if len(direct) < 10 {
		t.Fatalf("only %d direct dependencies found in go.mod", len(direct))
	}
	for _, m := range direct {
		// The table names siblings in short: "golang.org/x/sys, x/sync".
		short := regexp.MustCompile(`/v\d+$`).ReplaceAllString(m[1], "")
		for !strings.Contains(string(doc), short) && strings.Contains(short, "/") {
			_, short, _ = strings.Cut(short, "/")
		}
		if !strings.Contains(string(doc), short) {
			t.Errorf("docs/dependencies.md does not say what %s is for", m[1])
		}
	}
}
