package lb

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/systemd"
)

// A connection that is opened while the speaker of a node is away, as its unit restarts or it was killed, waits for the next one
// and is answered: systemd keeps the listener, and the address stays local and filtered. 'systemctl stop' gives the listener up.
func TestRestartUnderSystemd(t *testing.T) {
	inParallel(t)
	b := newBed(t, 0)
	pod := b.net.Host("pod")
	b.backend(pod, 8080)
	name, port, proto := "http", int32(8080), corev1.ProtocolTCP
	_, err := b.client.DiscoveryV1().EndpointSlices("default").Create(b.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4().String()}}},
	}, metav1.CreateOptions{})
	b.must(err)
	vip := b.service("web", func(s *corev1.Service) {
		s.Annotations = map[string]string{"fairlead.dev/lb-idle-timeout": "60"}
	})[0]
	n := b.addNode("n1")
	n.args.Announce = v1.AnnounceNone
	n.host.Serve(svc.TCP, 22) // on all of its addresses
	client := b.net.Outside("routed")
	client.Route(netip.PrefixFrom(vip, vip.BitLen()), n.host.Addr4())
	u := newUnit(n)
	dial := func(port uint16) (c net.Conn, err error) {
		client.Do(func() { c, err = net.DialTimeout("tcp", netip.AddrPortFrom(vip, port).String(), testbed.Patience) })
		return c, err
	}
	ask := func(c net.Conn) error {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(testbed.Patience))
		_, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
		b.must(err)
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && answer.StatusCode != http.StatusOK {
			err = errors.New(answer.Status)
		}
		return err
	}
	u.Systemctl("start", "lb.service")
	testbed.Until(b, "the first answer", func() error {
		c, err := dial(80)
		if err != nil {
			return err
		}
		return ask(c)
	})
	var routes strings.Builder
	monitor := n.host.Command(b.Context(), "ip", "-oneline", "monitor", "route")
	monitor.Stdout = &routes
	b.must(monitor.Start())
	for _, how := range [][]string{{"restart", "--no-block", "lb.service"}, {"kill", "--signal=KILL", "lb.service"}} {
		u.hold()
		u.Systemctl(how...)
		u.held()
		c, err := dial(80)
		if err != nil {
			t.Fatalf("%s: a new connection while the speaker is away: %v", how[0], err)
		}
		if _, err := dial(22); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: another port of the address while the speaker is away: %v", how[0], err)
		}
		u.release()
		if err := ask(c); err != nil {
			t.Errorf("%s: a connection that waits for the next speaker: %v", how[0], err)
		}
	}
	_ = monitor.Process.Signal(syscall.SIGTERM)
	_ = monitor.Wait()
	if strings.Contains(routes.String(), "Deleted local "+vip.String()) {
		t.Errorf("the address was not local for a while:\n%s", routes.String())
	}
	u.Systemctl("stop", "lb.service")
	if _, err := dial(80); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after 'systemctl stop': %v", err)
	}
}

// unit is a speaker as a unit lb.service of its own systemd, with what docs/loadbalancer.md says of the unit.
type unit struct {
	*systemd.Manager
	*bed
	dir string
}

func newUnit(n *node) *unit {
	b := n.bed
	b.Helper()
	u := &unit{bed: b, dir: b.TempDir()}
	text, err := json.Marshal(n.args)
	b.must(err)
	b.must(os.WriteFile(u.path("args"), text, 0o600))
	// Its first process is this one: systemd's LISTEN_PID is its own.
	script := fmt.Sprintf("touch %[1]s/held\nwhile test -e %[1]s/hold; do sleep 0.02; done\n"+
		"%[2]s=$(cat %[1]s/args)\nexport %[2]s\nexec %[3]s\n", u.dir, speakerEnv, os.Args[0])
	b.must(os.WriteFile(u.path("run"), []byte(script), 0o600))
	network := filepath.Join("/run", "fairlead-test-"+filepath.Base(u.dir))
	b.must(os.WriteFile(network, nil, 0o600))
	b.must(syscall.Mount(n.host.NSPath(), network, "", syscall.MS_BIND, ""))
	b.Cleanup(func() {
		_ = syscall.Unmount(network, syscall.MNT_DETACH)
		_ = os.Remove(network)
	})
	u.Manager = systemd.Boot(b.TB, map[string]string{"lb.service": "FileDescriptorStoreMax=16\nNotifyAccess=main\nRestart=always\n" +
		"RestartSec=10ms\nNetworkNamespacePath=" + network + "\nExecStart=/bin/sh " + u.path("run")})
	return u
}

func (u *unit) path(name string) string { return filepath.Join(u.dir, name) }

// hold makes the next process wait before it begins, held waits until it does, and release ends that.
func (u *unit) hold() {
	b := u.bed
	b.must(os.Remove(u.path("held")))
	b.must(os.WriteFile(u.path("hold"), nil, 0o600))
}

func (u *unit) held() {
	testbed.Until(u.TB, "the next process", func() error { _, err := os.Stat(u.path("held")); return err })
}

func (u *unit) release() { u.must(os.Remove(u.path("hold"))) }
