package cli

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/config"
)

// kubeProxyFlags are the flags of the real kube-proxy with their defaults; a test of bench/peers/kubernetes compares the
// list with the program.
func kubeProxyFlags(t *testing.T) map[string]string {
	t.Helper()
	f, err := os.Open("kubeproxy/testdata/flags.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]string{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, quoted, _ := strings.Cut(lines.Text(), " ")
		if out[name], err = strconv.Unquote(quoted); err != nil {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
	}
	if len(out) < 56 {
		t.Fatalf("the list has only %d flags", len(out))
	}
	return out
}

// otherDefaults are the flags whose defaults differ from kube-proxy's, with the page that says so.
var otherDefaults = map[string]string{
	"config":                   "docs/configuration.md",
	"ipvs-exclude-cidrs":       "an empty list in another writing",
	"iptables-min-sync-period": "docs/proxy.md",
	"ipvs-min-sync-period":     "docs/proxy.md",
	"ipvs-scheduler":           "its default by its name",
}

// 'fairlead proxy' takes every flag of kube-proxy, with its default and its shorthand.
func TestProxyTakesEveryFlagOfKubeProxy(t *testing.T) {
	proxy := config.Section(emptyRoot(), "proxy")
	for name, def := range kubeProxyFlags(t) {
		f := proxy.Flags().Lookup(name)
		if f == nil {
			t.Errorf("fairlead proxy has no flag --%s", name)
			continue
		}
		if why, differs := otherDefaults[name]; f.DefValue != def && !differs {
			t.Errorf("--%s: the default is %q, kube-proxy's %q", name, f.DefValue, def)
		} else if f.DefValue == def && differs {
			t.Errorf("--%s has the default of kube-proxy after all (%s)", name, why)
		}
	}
	if f := proxy.Flags().ShorthandLookup("v"); f == nil || f.Name != "v" {
		t.Error("there is no -v")
	}
}

// complete parses a command line of 'fairlead proxy' and completes the flags, as far as that works without a server.
func complete(t *testing.T, args ...string) (*pflag.FlagSet, error) {
	t.Helper()
	root := emptyRoot()
	var proxy *cobra.Command
	for _, c := range root.Commands() {
		if c.Name() == "proxy" {
			proxy = c
		}
	}
	proxy.SetContext(t.Context())
	proxy.RunE = func(*cobra.Command, []string) error { return nil }
	root.SetArgs(append([]string{"proxy"}, args...))
	return proxy.Flags(), root.ExecuteContext(t.Context())
}

const kubeProxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// The command lines and files that start kube-proxy set these flags of fairlead.
func TestProxyStartsWithKubeProxysCommandLines(t *testing.T) {
	for _, c := range []struct {
		name, file string // with "FILE" in args
		args, want string
	}{
		{"kubeadm", kubeProxyHead + "clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}\n" +
			"clusterCIDR: 10.244.0.0/16\nmode: \"\"\n",
			"--config=FILE --hostname-override=Node1",
			"node-name=node1 mode=auto kubeconfig=/var/lib/kube-proxy/kubeconfig.conf cluster-cidr=10.244.0.0/16 " +
				"detect-local-mode=ClusterCIDR nodeport-addresses=[all] healthz-bind-address=0.0.0.0:10256"},
		{"k3s", "", "--cluster-cidr=10.42.0.0/16 --conntrack-max-per-core=0 --conntrack-tcp-timeout-close-wait=0s " +
			"--conntrack-tcp-timeout-established=0s --healthz-bind-address=127.0.0.1 --hostname-override=k3s --kubeconfig=/k --proxy-mode=iptables",
			"node-name=k3s mode=iptables conntrack-max-per-core=0 conntrack-tcp-timeout-established=0s healthz-bind-address=127.0.0.1:10256 " +
				"nodeport-addresses=[all]"},
		{"EKS", kubeProxyHead + "mode: iptables\niptables: {masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 0s, syncPeriod: 30s}\n" +
			"bindAddress: 0.0.0.0\nconfigSyncPeriod: 15m0s\nconntrack: {maxPerCore: 32768, min: 131072}\noomScoreAdj: -998\nportRange: \"\"\n",
			"--v=2 --config=FILE", "mode=iptables iptables-sync-period=30s oom-score-adj=-998 log-level=info"},
		{"nftables", "", "--proxy_mode nftables -v 4 --logging-format json",
			"mode=nft nodeport-addresses=[primary] detect-local-mode=ClusterCIDR log-level=debug log-format=json"},
		{"ipvs", "", "--proxy-mode ipvs", "mode=ipvs nodeport-addresses=[]"},
		{"fairlead's own flags come first", kubeProxyHead + "mode: ipvs\nnodePortAddresses: [primary, localhost]\n",
			"--config FILE --mode nft --node-name a", "mode=nft node-name=a nodeport-addresses=[primary,localhost]"},
		{"flags beside a file do not count", kubeProxyHead + "conntrack: {min: 5}\n",
			"--config FILE --conntrack-min 7 --nodeport-addresses 10.0.0.0/8 --healthz-port 1 --kubeconfig /k",
			"conntrack-min=5 nodeport-addresses=[all] healthz-bind-address=0.0.0.0:10256 kubeconfig=/k"},
		{"ports", "", "--healthz-port 0 --metrics-port 9999", "healthz-bind-address= metrics-bind-address=127.0.0.1:9999"},
		{"IPv6", "", "--bind-address ::", "healthz-bind-address=[::]:10256 metrics-bind-address=[::1]:10249"},
		{"without node ports on localhost", "", "--proxy-mode iptables --iptables-localhost-nodeports=false", "nodeport-addresses=[]"},
		{"without kube-proxy's names", "", "--node-name a", "mode=auto nodeport-addresses=[] detect-local-mode="},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := strings.Fields(strings.ReplaceAll(c.args, "FILE", writeConfig(t, c.file)))
			flags, err := complete(t, args...)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range strings.Fields(c.want) {
				name, value, _ := strings.Cut(want, "=")
				if f := flags.Lookup(name); f.Value.String() != value {
					t.Errorf("--%s is %q, want %q", name, f.Value.String(), value)
				}
			}
		})
	}
}

// A typing error, and what kube-proxy refuses, gets one line that names the flag or the field.
func TestProxyRefusesWhatKubeProxyRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--proxy-mode nftable":                                    `"nftable"; want iptables, ipvs or nftables; did you mean nftables?`,
		"--proxy-mode kernelspace":                                "want iptables, ipvs or nftables",
		"--detect-local-mode BridgeInterface":                     "needs --pod-bridge-interface",
		"--detect-local-mode InterfaceNamePrefix":                 "needs --pod-interface-name-prefix",
		"--show-hidden-metrics-for-version 1.2":                   "want 1.36",
		"--oom-score-adj 2000":                                    "-1000 to 1000",
		"--iptables-masquerade-bit 32":                            "0 to 31",
		"--feature-gates A":                                       `--feature-gates has "A"; want NAME=true`,
		"--vmodule a=b":                                           "--vmodule",
		"--nodeport-addresses nowhere":                            `"localhost"`,
		"--logging-format xml":                                    "--logging-format",
		"--config-sync-period 0s":                                 "--config-sync-period",
		"--iptables-sync-period 1s --iptables-min-sync-period 2s": "--iptables-sync-period",
		"--healthz-port 70000":                                    "0 to 65535",
		"--version=maybe":                                         "--version",
	} {
		if _, err := complete(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	path := writeConfig(t, kubeProxyHead+"conntrack:\n  min: -1\n")
	if _, err := complete(t, "--config", path); err == nil || !strings.Contains(err.Error(), "line 4: conntrack.min") {
		t.Errorf("a file with a mistake: %v", err)
	}
	if code, _, errs := fairlead(t, "dns", "--config", path); code != exitUsage || !strings.Contains(errs, "line 4") {
		t.Errorf("fairlead dns with it: %d, %s", code, errs)
	}
	code, _, errs := fairlead(t, "dns", "--config", writeConfig(t, kubeProxyHead))
	if code != exitUsage || !strings.Contains(errs, "only 'fairlead proxy'") {
		t.Errorf("fairlead dns with a KubeProxyConfiguration: %d, %s", code, errs)
	}
}

// --write-config-to writes a file that sets the same flags.
func TestProxyWritesItsConfiguration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	args := "--proxy-mode nftables --cluster-cidr 10.244.0.0/16 --nodeport-addresses primary,localhost --conntrack-min 9 --masquerade-all " +
		"--feature-gates A=true --hostname-override n --iptables-sync-period 7s --iptables-masquerade-bit 3 --write-config-to " + path
	if code, _, errs := fairlead(t, append([]string{"proxy"}, strings.Fields(args)...)...); code != exitDone {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	flags, err := complete(t, "--config", path)
	if err != nil {
		text, _ := os.ReadFile(path)
		t.Fatalf("%v in\n%s", err, text)
	}
	for name, want := range map[string]string{
		"mode": "nft", "cluster-cidr": "10.244.0.0/16", "nodeport-addresses": "[primary,localhost]", "conntrack-min": "9",
		"masquerade-all": "true",
		"feature-gates":  "A=true", "node-name": "n", "iptables-sync-period": "7s", "iptables-masquerade-bit": "3", "oom-score-adj": "-999",
	} {
		if got := flags.Lookup(name).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", name, got, want)
		}
	}
	if code, out, _ := fairlead(t, "proxy", "--version"); code != exitDone || !strings.HasPrefix(out, "fairlead ") {
		t.Errorf("--version: %d, %q", code, out)
	}
	if code, out, errs := fairlead(t, "config", "check", "--config", path); code != exitDone || !strings.Contains(out, "is valid") {
		t.Errorf("config check: %d, %s%s", code, out, errs)
	}
}

// docs/kubernetes.md lists every flag of kube-proxy, each with what it does here.
func TestKubernetesPageListsTheFlags(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range kubeProxyFlags(t) {
		if !regexp.MustCompile(fmt.Sprintf("`(-v, )?--%s`", regexp.QuoteMeta(name))).Match(text) {
			t.Errorf("docs/kubernetes.md does not list --%s", name)
		}
	}
}
