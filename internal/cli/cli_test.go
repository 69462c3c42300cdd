package cli

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// call runs a command line and returns its exit code and output.
func call(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, base.Streams{In: strings.NewReader(""), Out: &out, Err: &err})
	return code, out.String(), err.String()
}

func TestWrongUsageExitsWith2AndOneClearLine(t *testing.T) {
	for want, args := range map[string][]string{
		`unknown command "upp"`:                                        {"upp"},
		"unknown flag: --nope":                                         {"server", "--nope"},
		`status takes one name at most, but got "a`:                    {"status", "a", "b"},
		`--output is "yaml"; want table or json`:                       {"status", "-o", "yaml"},
		"no command to run":                                            {"run", "-l", "app=a"},
		"give one or the other":                                        {"run", "--name", "a", "--every-node", "--replicas", "5", "--", "true"},
		"--dry-run prints one object":                                  {"run", "--replicas", "3", "--dry-run", "--", "true"},
		"--output is for --dry-run":                                    {"run", "-o", "json", "--", "true"},
		"--replicas is 0; want 1 to 1000":                              {"run", "--replicas", "0", "--", "true"},
		`--log-level is "loud"`:                                        {"server", "--log-level", "loud"},
		`"x" is not an IP address`:                                     {"server", "--bind-address", "x"},
		`"10.0.0.0" is not a network`:                                  {"server", "--service-cluster-ip-range", "10.0.0.0"},
		`"1" is not a port range`:                                      {"server", "--service-node-port-range", "1"},
		"--server-name has no effect without":                          {"server", "--server-name", "a", "--data-dir", t.TempDir()},
		"--token-file has no effect without":                           {"server", "--token-file", "f", "--data-dir", t.TempDir()},
		`10.96.0.0/16: IPv4 field has value >255`:                      {"server", "--cluster-cidr", "300.0.0.0/8"},
		`--port "http=99999": the port 99999 is not one of 1 to 65535`: {"run", "-p", "http=99999", "--", "true"},
		`--port "http=0": the port 0 is not one of 1 to 65535`:         {"run", "-p", "http=0", "--", "true"},
		"IP:PORT with a port of 1 to 65535, nor":                       {"dns", "--upstream", "192.0.2.1:99999"},
		"overlap":                                                      {"server", "--cluster-cidr", "10.96.0.0/12"},
		`--controllers: "nope" is not one of`:                          {"server", "--controllers", "nope", "--data-dir", t.TempDir()},
		"--max-endpoints-per-slice is 2000; want":                      {"controllers", "--max-endpoints-per-slice", "2000"},
		`--controllers: "none" is not one of`:                          {"controllers", "--controllers", "none"},
		"--cluster-domain is empty":                                    {"agent", "--cluster-domain", ""},
		`--node-name "` + strings.Repeat("a", 64):                      {"agent", "--node-name", strings.Repeat("a", 64)},
		`--dns-port must be 1 to 65535`:                                {"up", "--dns-port", "0"},
		`--agent-port must be 1 to 65535`:                              {"agent", "--agent-port", "0"},
		// What all commands have is checked by those without a log, too.
		`--log-level is "ino"; want debug, info, warn or error; did you mean info?`: {"status", "--log-level", "ino"},
		`--log-format is "yaml"; want text or json`:                                 {"kubeconfig", "--log-format", "yaml"},
		`--log-level is "x"; want debug`:                                            {"token", "list", "--log-level", "x"},
		`--node-name "a_b" cannot be the name of a Node`:                            {"proxy", "--node-name", "a_b"},
		`--node-name "A" cannot be the name of a Node`:                              {"agent", "--node-name", "A"},
		`--node-name "-" cannot be the name of a Node`:                              {"up", "--node-name", "-"},
		`--cluster-domain: cluster domain "c..d"`:                                   {"agent", "--cluster-domain", "c..d"},
		`--cluster-domain: cluster domain "e..f"`:                                   {"up", "--cluster-domain", "e..f"},
		`unknown command "stats"; did you mean status?`:                             {"stats"},
		`unknown command "revok"; did you mean revoke?`:                             {"token", "revok"},
		`unknown flag: --node-nam; did you mean --node-name?`:                       {"proxy", "--node-nam", "a"},
		`unknown flag: --log-lvel; did you mean --log-level?`:                       {"status", "--log-lvel", "a"},
		`--mode is "ntf"; want auto, nft, iptables, ipvs or userspace; did you`:     {"proxy", "--mode", "ntf"},
		`; did you mean endpointslice?`:                                             {"controllers", "--controllers", "endpointslices"},
		`--configure-resolver needs --node-local`:                                   {"dns", "--configure-resolver"},
		`--component is "dsn"; want proxy, dns or lb; did you mean dns?`:            {"migrate", "apply", "--component", "dsn"},
		`--component is ""; want proxy, dns or lb`:                                  {"migrate", "rollback", "--component", ""},
		`--component is "coredns"; want proxy, dns or lb`:                           {"migrate", "plan", "--component", "coredns"},
		`--nodes is for --component proxy`:                                          {"migrate", "apply", "--component", "dns", "--nodes", "a"},
		`--nodes is for --component proxy; lb has`:                                  {"migrate", "apply", "--component", "lb", "--nodes", "a"},
		`--servers has "x"; want IP:PORT`:                                           {"migrate", "compare-dns", "--servers", "x", "a/A"},
		`"a" is not a question; want NAME/TYPE`: {
			"migrate", "compare-dns", "--servers", "192.0.2.1:53", "--like", "192.0.2.2:53", "a",
		},
		// Without a kubeconfig: flags are checked first.
		`--mode is "x"; want auto, nft`:                  {"proxy", "--mode", "x"},
		`--mode is "y"; want auto, nft`:                  {"agent", "--mode", "y"},
		`--iptables-variant is "x"; want`:                {"proxy", "--iptables-variant", "x"},
		`--userspace-connect-timeout is 0s; want`:        {"proxy", "--userspace-connect-timeout", "0"},
		`"--proxy-port-range" flag: "5-4" is not`:        {"proxy", "--proxy-port-range", "5-4"},
		`--detect-local-mode is "x"; want Cl`:            {"proxy", "--detect-local-mode", "x"},
		`--balance is "x"; want random`:                  {"proxy", "--balance", "x"},
		`--sync-period is -1s; want more`:                {"proxy", "--sync-period=-1s"},
		`--otlp-sample is 2; want 0 to 1`:                {"proxy", "--otlp-sample=2"},
		`--otlp-sample is 3; want 0 to 1`:                {"controllers", "--otlp-sample=3"},
		`--otlp-endpoint: only the controller prog`:      {"controllers", "--otlp-endpoint=http://192.0.2.1:4317"},
		`--otlp-endpoint is "c:1"; want https://`:        {"server", "--otlp-endpoint=c:1"},
		`--healthz-bind-address is "10256"; want`:        {"proxy", "--healthz-bind-address", "10256"},
		`--metrics-bind-address is ":x"; want`:           {"proxy", "--metrics-bind-address", ":x"},
		`--conntrack-min is negative`:                    {"proxy", "--conntrack-min=-1"},
		`"x" is neither "primary", "localhost" or "all"`: {"proxy", "--nodeport-addresses", "x"},
		`--ipvs-scheduler is "x"; want one of rr`:        {"proxy", "--ipvs-scheduler", "x"},
		`10.96.1.0/24 overlaps the range of`: {"proxy", "--ipvs-exclude-cidrs", "10.96.1.0/24", "--service-cluster-ip-range",
			"10.96.0.0/16"},
		`invalid address to listen on "x"`:                                {"dns", "--listen", "x"},
		`--listen :53 includes the addresses`:                             {"dns", "--listen", ":53", "--node-local", "10.96.0.10"},
		`cluster domain "a..b" is not a domain`:                           {"dns", "--cluster-domain", "a..b"},
		`--metrics-bind-address is "9153"; want`:                          {"dns", "--metrics-bind-address", "9153"},
		`--upstream: "nowhere" is neither IP`:                             {"dns", "--upstream", "nowhere"},
		`--dns-ttl is 0; want 1 to 3600`:                                  {"dns", "--dns-ttl", "0"},
		`--dns-cache-size is 0; want 1`:                                   {"agent", "--dns-cache-size", "0"},
		`--dns-max-in-flight is 0; want 1`:                                {"up", "--dns-max-in-flight", "0"},
		`--upstream-timeout is -1s; want more`:                            {"dns", "--upstream-timeout=-1s"},
		`--upstream-policy is "x"; want random`:                           {"dns", "--upstream-policy", "x"},
		`--dns-serve-stale is -1s; want 0`:                                {"dns", "--dns-serve-stale=-1s"},
		`--dns-lameduck is -1s; want 0`:                                   {"dns", "--dns-lameduck=-1s"},
		`--dns-metrics-bind-address is "9153"`:                            {"agent", "--dns-metrics-bind-address", "9153"},
		`--sort-by is "cpus"; want name, cpu or`:                          {"top", "pods", "--sort-by", "cpus"},
		`a name takes the place of --selector`:                            {"top", "pods", "web", "-A"},
		`takes one name at most, but got "a b"`:                           {"top", "nodes", "a", "b"},
		`unknown command "pdos"; did you mean`:                            {"top", "pdos"},
		`"basch"; want bash, fish, powershell or zsh; did you mean bash?`: {"completion", "basch"},
		`--replicas is "x"; want a whole number`:                          {"run", "--replicas", "x", "--", "true"},
		`--dns-port is "70000"; want a whole number from 0 to 65535`:      {"agent", "--dns-port", "70000"},
		`--upstream-timeout is "5"; want a duration, such as`:             {"dns", "--upstream-timeout", "5"},
		`-A lists the sets of all namespaces; for the Pods of web`:        {"ps", "-A", "web"},
		`-A lists the sets of all namespaces; leave out -n`:               {"ps", "-A", "-n", "shop"},
		`--listen does not go with --corefile`:                            {"dns", "--corefile", "x", "--listen", "127.0.0.1:53"},
		`corefile: open nosuch: no such file`:                             {"dns", "--corefile", "nosuch"},
		`fairlead plan needs -f FILE`:                                     {"plan"},
		`unknown flag: --nosuch`:                                          {"plan", "--nosuch"},
		`fairlead plan takes no arguments, but got "a.yaml"`:              {"plan", "a.yaml"},
	} {
		code, stdout, stderr := call(t, args...)
		usage := exitUsage
		if args[0] == "plan" { // whose exit code 2 is for connections that would be cut
			usage = 64
		}
		if code != usage || !strings.Contains(stderr, want) || stdout != "" {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q; want %d and %q", args, code, stdout, stderr, usage, want)
		}
	}
}

func TestFailureExitsWith1AndSaysWhatToDo(t *testing.T) {
	empty := t.TempDir()
	t.Setenv("KUBECONFIG", "")
	for _, args := range [][]string{
		{"status", "--data-dir", empty},
		{"run", "--data-dir", empty, "--", "true"},
		{"kubeconfig", "--data-dir", empty},
		{"controllers", "--data-dir", empty},
	} {
		code, _, stderr := call(t, args...)
		if code != exitFailed || !strings.Contains(stderr, "fairlead up") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: exit code %d, stderr %q", args, code, stderr)
		}
	}
}

// Who cannot reach the server is told what to do, in the same line.
func TestUnreachableServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close() // no listener there now
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: a, "+
		"clusters: [{name: a, cluster: {server: \"http://%s\"}}], contexts: [{name: a, context: {cluster: a}}]}", l.Addr())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr := call(t, "status", "--kubeconfig", file)
	if code != exitFailed || !strings.Contains(stderr, "refused; no server runs there") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	for want, err := range map[string]error{
		"clocks":         fmt.Errorf("get: %w", x509.CertificateInvalidError{Reason: x509.Expired}),
		"another server": fmt.Errorf("get: %w", x509.UnknownAuthorityError{}),
	} {
		if got := base.Remedy(err); !strings.Contains(got, want) {
			t.Errorf("%v: %q, want something with %q", err, got, want)
		}
	}
	if got := base.Remedy(errors.New("x")); got != "" {
		t.Errorf("a remedy for anything: %q", got)
	}
}

func TestKubeconfigPrintsTheFileOrItsPath(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "admin.kubeconfig")
	if err := os.WriteFile(file, []byte("apiVersion: v1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, out, _ := call(t, "kubeconfig", "--data-dir", dir); out != "apiVersion: v1\n" {
		t.Errorf("printed %q", out)
	}
	if _, out, _ := call(t, "kubeconfig", "--data-dir", dir, "--path"); out != file+"\n" {
		t.Errorf("printed %q", out)
	}
	const here = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {server: 'https://127.0.0.1:6443'}\n"
	if err := os.WriteFile(file, []byte(here), 0o600); err != nil {
		t.Fatal(err)
	}
	const other = "https://192.0.2.11:6443"
	_, out, _ := call(t, "kubeconfig", "--data-dir", dir, "--server", other)
	if !strings.Contains(out, other) || strings.Contains(out, "127.0.0.1") {
		t.Errorf("printed %q", out)
	}
	for _, wrong := range [][]string{{"--server", "192.0.2.11"}, {"--server", other, "--path"}} {
		if code, out, _ := call(t, append([]string{"kubeconfig", "--data-dir", dir}, wrong...)...); code != 2 || out != "" {
			t.Errorf("%s: exit code %d, printed %q", wrong, code, out)
		}
	}
}

// Every command's help has an example, and help is no error.
func TestHelp(t *testing.T) {
	root := newRoot(base.Streams{})
	for _, c := range root.Commands() {
		if c.Hidden || c.Name() == "help" || c.Name() == "version" {
			continue
		}
		code, out, _ := call(t, c.Name(), "--help")
		if code != exitDone || !strings.Contains(out, "Examples:") || !strings.Contains(out, "fairlead "+c.Name()) {
			t.Errorf("fairlead %s --help: exit code %d, no example in:\n%s", c.Name(), code, out)
		}
	}
}
