package lb

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// fairlead lb as a user that is not root, with CAP_NET_RAW and CAP_NET_ADMIN and nothing else, beside
// another program's proxy, whose health counts: it announces, takes over, and counts.
func TestTwoCapabilities(t *testing.T) {
	inParallel(t)
	network := testbed.NewNetwork(t)
	dir := t.TempDir()
	program := process.Program("fairlead")
	for _, d := range []string{dir, filepath.Dir(dir), filepath.Dir(program)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	host := network.Outside("server")
	server := process.NewServer(host, program, filepath.Join(dir, "server"),
		"--bind-address", "127.0.0.1,"+host.Addr4().String(), "--lb-pool", pools)
	server.Start(t)
	server.AwaitReady(t)
	kubeconfig := server.KubeconfigAt(t, host.Addr4())
	if err := os.Chmod(filepath.Dir(kubeconfig), 0o755); err != nil {
		t.Fatal(err)
	}
	var sick atomic.Bool
	const unprivileged = "65534"
	hosts := map[arp.MAC]*testbed.Host{}
	speakers := map[arp.MAC]*process.Process{}
	for _, name := range []string{"n1", "n2"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := server.Client.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		h := network.Outside(name)
		healthz(t, h, &sick)
		cmd := h.Command(context.Background(), "setpriv", "--reuid", unprivileged, "--regid", unprivileged, "--clear-groups",
			"--inh-caps", "-all,+net_raw,+net_admin", "--ambient-caps", "-all,+net_raw,+net_admin", "--bounding-set", "-all,+net_raw,+net_admin",
			"--no-new-privs", "sh", "-c", `grep -E "^(Uid|CapPrm|CapBnd)" /proc/self/status; exec "$0" "$@"`,
			program, "lb", "--kubeconfig", kubeconfig, "--node-name", name, "--controller=false")
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/"}
		p := process.Start(t, cmd)
		for _, want := range []string{`Uid:\s65534\s65534\s65534`, `CapPrm:\s0000000000003000`, `CapBnd:\s0000000000003000`} {
			p.Says(want)
		}
		mac := arp.MACOf(t, h, "eth0")
		hosts[mac], speakers[mac] = h, p
	}
	b := &bed{TB: t, client: server.Client, wire: listenOn(t, network.Outside("client"))}
	var err error
	b.lb, err = v1.NewClient(server.Config)
	b.must(err)
	b.voters(3)
	vip := selectorless(t, server, host.Addr4())
	owner := func() (mac arp.MAC) {
		testbed.Until(t, "an owner of "+vip.String(), func() error {
			var ok bool
			if mac, ok = b.wire.Who(vip); !ok || speakers[mac] == nil {
				return fmt.Errorf("%x answers", mac)
			}
			return nil
		})
		return mac
	}
	first := owner()
	speakers[first].Kill()
	delete(speakers, first)
	second := owner()
	testbed.Until(t, "the metrics of the second", func() error {
		var text []byte
		var err error
		hosts[second].Do(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			text, err = hosts[second].Command(ctx, "curl", "-sS", "http://127.0.0.1:7472/metrics").CombinedOutput()
		})
		// More than once on a slow machine, where it may lose the majority and take the address again.
		taken := strings.Count(speakers[second].Log(), `msg="announcing an address"`)
		for name, want := range map[string]int{"addresses": 1, "taken_total": max(taken, 1), "voters": 3} {
			if line := fmt.Sprintf("\nfairlead_lb_speaker_%s %d\n", name, want); err != nil || !strings.Contains(string(text), line) {
				return fmt.Errorf("no line %q: %v: %s", line, err, text)
			}
		}
		return nil
	})
	sick.Store(true)
	b.silence(vip)
	sick.Store(false)
	if owner() != second {
		t.Error("the node that is left does not answer again")
	}
	if log := speakers[second].Log(); strings.Contains(log, "permitted") || strings.Contains(log, "denied") {
		t.Errorf("it lacks a permission:\n%s", log)
	}
}

// healthz answers in the place of a node's proxy, kube-proxy's or another one, while that is healthy.
func healthz(t *testing.T, h *testbed.Host, sick *atomic.Bool) {
	t.Helper()
	l := h.ListenTCP(netip.MustParseAddrPort("127.0.0.1:10256"))
	s := &http.Server{ReadHeaderTimeout: testbed.Patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if sick.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
}
