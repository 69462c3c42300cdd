package cli

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/config"
)

// writeConfig writes a configuration file of mode 0600 and returns its path.
func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// fairlead runs a command and returns its exit code and what it printed.
func fairlead(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code = run(t.Context(), args, base.Streams{In: strings.NewReader(""), Out: &stdout, Err: &stderr})
	return code, stdout.String(), stderr.String()
}

func TestConfigFileMistakesAreNamedByLineAndField(t *testing.T) {
	for text, want := range map[string]string{
		"server:\n  secure-prt: 1":                 "server.secure-prt: fairlead server has no such flag; did you mean secure-port?",
		"servr:\n  secure-port: 1":                 "config.yaml:2: servr: neither a command nor a flag that all have; want log-format",
		"server:\n  secure-port: many":             `config.yaml:2: server.secure-port: "many": invalid syntax`,
		"server:\n  secure-port: 70000":            `config.yaml:2: server.secure-port: "70000": value out of range`,
		"server:\n  secure-port: [1, 2]":           "config.yaml:2: server.secure-port: is a list; want one value",
		"server:\n  data-dir: [/a, /b]":            "config.yaml:2: server.data-dir: is a list; want one value",
		"server:\n  data-dir: {a: b}":              "config.yaml:2: server.data-dir: is a mapping; want a value",
		"server:\n  data-dir:":                     "config.yaml:2: server.data-dir: has no value",
		"server:\n  bind-address: [127.0.0.1, x]":  `"x" is not an IP address`,
		"server:\n  etcd-servers:\n  - a\n  - [b]": "config.yaml:3: server.etcd-servers: line 4: want one value",
		"server:\n  data-dir: /a\n  data-dir: /b":  "config.yaml:3: server.data-dir: is already in line 2",
		"server: 1":                             "config.yaml:1: server: want a mapping of flags to values",
		"- a":                                   "config.yaml:1: the file: want a mapping of flags to values",
		"server:\n\tdata-dir: /a":               "config.yaml: line 2: found character that cannot start any token",
		"log-level: debug\n---\nserver: {}":     "second document",
		"log-level: loud":                       `config.yaml:1: log-level: --log-level is "loud"`,
		"agent:\n  config: /x":                  "config.yaml:2: agent.config: fairlead agent has no such flag",
		"server:\n  cluster-cidr: 10.96.0.0/17": "config.yaml: server: --cluster-cidr 10.96.0.0/17 and --service-cluster-ip-range",
		"agent:\n  token: x\nserver:\n  secure-prt: 1\n":       "config.yaml:4: server.secure-prt",
		"server:\n  default-namespace-quota: {a/b: [1]}":       "config.yaml:2: server.default-namespace-quota: a/b: want one value",
		"server:\n  default-namespace-quota: {a/b: 1, a/b: 2}": "config.yaml:2: server.default-namespace-quota: a/b: is already in line 2",
		"server:\n  default-namespace-quota: {a/b: }":          "config.yaml:2: server.default-namespace-quota: a/b: want one value",
		"lb:\n  lb-pool: [192.0.2.0/24, 192.0.2.9-oops]":       "config.yaml:2: lb.lb-pool:",
		"server:\n  oidc-required-claim: {a: {b: c}}":          "config.yaml:2: server.oidc-required-claim: a: want one value",
		"proxy:\n  mode: [nft]\ndns:\n  listen: 10.0.0.1":      "config.yaml:2: proxy.mode: is a list; want one value",
	} {
		path := writeConfig(t, text)
		if code, _, errs := fairlead(t, "config", "check", "--config", path); code == exitDone || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d, want a line with %q, got\n%s", text, code, want, errs)
		}
		if code, _, errs := fairlead(t, "controllers", "--config", path); code != exitUsage {
			t.Errorf("%q: 'fairlead controllers' exits %d: %s", text, code, errs)
		}
	}
}

func TestConfigFileWithATokenIsPrivate(t *testing.T) {
	path := writeConfig(t, "agent:\n  token: abcdef.0123456789abcdef\n")
	code, out, errs := fairlead(t, "config", "check", "--config", path)
	if code != exitDone || !strings.Contains(out, "is valid: it sets 1 flags") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if _, out, _ := fairlead(t, "config", "show", "--config", path); !strings.Contains(out, "not shown") || strings.Contains(out, "abcdef") {
		t.Errorf("the token is shown:\n%s", out)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := fairlead(t, "config", "check", "--config", path); code == exitDone || !strings.Contains(errs, "chmod 600") {
		t.Errorf("exit %d with mode 0644: %s", code, errs)
	}
}

// configuredFlags runs a command up to the point where it would begin to work, and returns
// its flags.
func configuredFlags(t *testing.T, args ...string) *cobra.Command {
	t.Helper()
	root := newRoot(base.Streams{In: strings.NewReader(""), Out: &bytes.Buffer{}, Err: &bytes.Buffer{}})
	stop := errors.New("stop")
	cmd := config.Section(root, args[0])
	cmd.PreRunE, cmd.RunE = nil, func(*cobra.Command, []string) error { return stop }
	root.SetArgs(args)
	if err := root.ExecuteContext(t.Context()); !errors.Is(err, stop) {
		t.Fatalf("%v: %v", args, err)
	}
	return cmd
}

func TestConfigFileSetsFlags(t *testing.T) {
	path := writeConfig(t, `
log-level: debug
log-format: json
server:
  log-format: text
  bind-address: [127.0.0.1, 192.0.2.10]
  secure-port: 6444
  etcd-servers: [https://a:2379, https://b:2379]
  controllers: []
  lb-pool: [192.0.2.200-192.0.2.250, internal=10.0.0.0/24]
  default-namespace-quota: {count/services: 50}
  strict-load-balancers: true
`)
	cmd := configuredFlags(t, "server", "--config", path, "--secure-port", "6445")
	for flag, want := range map[string]string{
		"log-level": "debug", "log-format": "text", "bind-address": "127.0.0.1,192.0.2.10",
		"secure-port":  "6445", // the command line comes first
		"etcd-servers": "[https://a:2379,https://b:2379]", "controllers": "[]",
		"lb-pool":                 "default=192.0.2.200-192.0.2.250 internal=10.0.0.0-10.0.0.255",
		"default-namespace-quota": "[count/services=50]", "strict-load-balancers": "true",
		"service-node-port-range": "30000-32767",
	} {
		if got := cmd.Flags().Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", flag, got, want)
		}
	}
	if got := configuredFlags(t, "agent", "--config", path).Flags().Lookup("log-format").Value.String(); got != "json" {
		t.Errorf("the agent's --log-format is %q: that of the server's section", got)
	}
	if got := configuredFlags(t, "server", "--config", "").Flags().Lookup("secure-port").Value.String(); got != "6443" {
		t.Errorf("without a file --secure-port is %q", got)
	}
}

// What 'config show' prints is a configuration file that sets the same values.
func TestConfigShowIsAConfigFile(t *testing.T) {
	for _, name := range config.Sections() {
		code, first, errs := fairlead(t, "config", "show", name, "--config", writeConfig(t, name+": {}"))
		if code != exitDone {
			t.Fatalf("%s: exit %d: %s", name, code, errs)
		}
		path := writeConfig(t, first)
		code, second, errs := fairlead(t, "config", "show", name, "--config", path)
		if code != exitDone {
			t.Errorf("%s: what was printed is rejected: %s", name, errs)
			continue
		}
		if strip(first) != strip(second) {
			t.Errorf("%s: printed\n%s\nthen\n%s", name, first, second)
		}
	}
	code, _, errs := fairlead(t, "config", "show", "run")
	if code != exitUsage || !strings.Contains(errs, `"run" has no flags in a configuration file`) {
		t.Errorf("exit %d: %s", code, errs)
	}
}

// strip removes the comments that say where values come from.
func strip(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		value, _, _ := strings.Cut(line, " #")
		out = append(out, strings.TrimSpace(value))
	}
	return strings.Join(out, "\n")
}

func FuzzConfigFile(f *testing.F) {
	f.Add("server:\n  secure-port: 1\nlog-level: debug")
	f.Add("agent: &a {token: x}\nlb: *a")
	f.Add("server:\n  <<: {secure-port: 1}")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := config.Parse("f", []byte(text))
		if err == nil {
			c.Check(emptyRoot())
		}
	})
}

// The example of docs/configuration.md is right.
func TestConfigurationPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	text, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("the page has no example")
	}
	code, out, errs := fairlead(t, "config", "check", "--config", writeConfig(t, text))
	if code != exitDone || !strings.Contains(out, "sets 6 flags") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

// Root does not follow a configuration that others may write.
func TestConfigFileOfOthers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: others may have any configuration read; make test as root runs it")
	}
	path := writeConfig(t, "server: {}")
	if err := os.Chmod(path, 0o664); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := fairlead(t, "config", "check", "--config", path); code == exitDone || !strings.Contains(errs, path) {
		t.Errorf("exit %d: %s", code, errs)
	}
}
