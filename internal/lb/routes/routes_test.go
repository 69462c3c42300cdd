package routes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/bfd"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// loopbackBird starts BIRD on a port of loopback, with this password for its one
// neighbor, and returns the port and what asks it.
func loopbackBird(t *testing.T, password string) (port int, ask func(...string) string) {
	t.Helper()
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin")
	program, err := exec.LookPath("bird")
	if err != nil {
		t.Skip("BIRD is not installed (Debian: bird2)")
	}
	dir := t.TempDir()
	port = process.FreePort(t)
	config := fmt.Sprintf(`router id 127.0.0.9;
log stderr all;
protocol device { }
protocol bgp node {
	local 127.0.0.1 port %d as 64512;
	neighbor 127.0.0.1 as 64513;
	password %q;
	multihop; passive;
	error wait time 1, 1; connect delay time 1;
	ipv4 { import all; export none; };
}
`, port, password)
	file := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "ctl")
	bird := exec.CommandContext(context.Background(), program, "-f", "-c", file, "-s", socket, "-P", filepath.Join(dir, "pid"))
	process.Start(t, bird).Says("Started")
	return port, func(command ...string) string {
		out, _ := process.Try(exec.CommandContext(context.Background(), "birdc", append([]string{"-s", socket}, command...)...))
		return out
	}
}

// A BFD session has the given times, and the defaults for the others.
func TestBFDOfPeers(t *testing.T) {
	t.Parallel()
	ms := func(n time.Duration) *metav1.Duration { return &metav1.Duration{Duration: n * time.Millisecond} }
	own := bfd.Config{Transmit: 50 * time.Millisecond, Receive: 70 * time.Millisecond, Multiplier: 5}
	one := bfd.Default()
	one.Receive = 70 * time.Millisecond
	for _, c := range []struct {
		spec  *v1.BFDSpec
		want  bfd.Config
		wrong string
	}{
		{nil, bfd.Config{}, ""},
		{&v1.BFDSpec{}, bfd.Default(), ""},
		{&v1.BFDSpec{ReceiveInterval: ms(70)}, one, ""},
		{&v1.BFDSpec{TransmitInterval: ms(50), ReceiveInterval: ms(70), DetectMultiplier: 5}, own, ""},
		{&v1.BFDSpec{TransmitInterval: ms(1)}, bfd.Config{}, "the BFD transmit interval 1ms is not between"},
		{&v1.BFDSpec{DetectMultiplier: 1}, bfd.Config{}, "the BFD detection multiplier 1 is not between"},
	} {
		spec := v1.BGPPeerSpec{Address: "192.0.2.9", LocalASN: 64513, PeerASN: 64512, BFD: c.spec}
		p, use, err := new(Routes).peerOf(&v1.BGPPeer{Spec: spec})
		if c.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%+v: %v, want %s", c.spec, err, c.wrong)
			}
			continue
		}
		if err != nil || !use || p.BFD != c.want {
			t.Errorf("%+v: %+v, %t, %v; want %+v", c.spec, p.BFD, use, err, c.want)
		}
	}
}

// A speaker's sessions follow the BGPPeers that select its node, and their passwords;
// the objects' Events and the speaker's status say what is.
func TestRoutesFollowPeers(t *testing.T) {
	port, ask := loopbackBird(t, "right")
	config := process.API(t)
	client := kubernetes.NewForConfigOrDie(config)
	objects, err := v1.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	definitions, err := v1.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range definitions {
		crds := extensions.NewForConfigOrDie(config).ApiextensionsV1().CustomResourceDefinitions()
		if _, err := crds.Create(t.Context(), d, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	recorder := events.NewRecorder(client, corev1.EventSource{Component: "fairlead-lb"}, log)
	t.Cleanup(recorder.Start())
	r := New(Options{Client: client, LB: objects, Node: "node1", Log: log, Events: recorder})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); r.Close(context.Background()); <-done })

	vip := netip.MustParseAddr("198.51.100.7")
	r.Announce(vip, &v1.IPAddressPool{Spec: v1.IPAddressPoolSpec{BGP: &v1.PoolBGP{
		PoolRoute: v1.PoolRoute{Communities: []string{"64513:7", "nonsense"}, AggregationLengthV4: new(int32(24))},
		// The peer of this name does not get the route of another one.
		Advertisements: []v1.PoolRoute{{Peers: []string{"elsewhere"}}},
	}}})
	node := func(rack string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{"rack": rack}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}}}
	}
	r.SetNode(node("a"))
	r.Begin()

	peer := &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "top"}, Spec: v1.BGPPeerSpec{
		Address: "127.0.0.1", Port: int32(port), LocalASN: 64513, PeerASN: 64512, PasswordSecretRef: &v1.SecretReference{Name: "md5"},
		NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"rack": "b"}},
	}}
	testbed.Until(t, "the kind to be served", func() error {
		_, err := objects.Peers.Create(t.Context(), peer, metav1.CreateOptions{})
		return err
	})
	status := func(want string) {
		t.Helper()
		testbed.Until(t, fmt.Sprintf("status %q", want), func() error {
			var got []string
			for _, s := range r.Status() {
				got = append(got, fmt.Sprintf("%s %s %s %d %s", s.Name, s.Address, s.State, s.Prefixes, s.Reason))
			}
			if text := strings.Join(got, "\n"); !strings.Contains(text, want) || want == "" && text != "" {
				return errors.New(text)
			}
			return nil
		})
	}
	event := func(reason, message string) {
		t.Helper()
		testbed.Until(t, "Event "+reason, func() error {
			only := metav1.ListOptions{FieldSelector: "involvedObject.kind=BGPPeer,reason=" + reason}
			l, err := client.CoreV1().Events("").List(t.Context(), only)
			if err != nil {
				return err
			}
			for _, e := range l.Items {
				if strings.Contains(e.Message, message) && e.InvolvedObject.Name == "top" {
					return nil
				}
			}
			return fmt.Errorf("%d Events", len(l.Items))
		})
	}
	testbed.Until(t, "the peer to be seen", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.objects["top"] == nil {
			return errors.New("not yet")
		}
		return nil
	})
	status("") // it selects another node

	r.SetNode(node("b"))
	status("cannot be used: there is no Secret kube-system/md5")
	event("InvalidBGPPeer", "there is no Secret kube-system/md5")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: "md5"},
		StringData: map[string]string{"password": "right\n"}}
	secret, err = client.CoreV1().Secrets(svc.SystemNamespace).Create(t.Context(), secret, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	status("top 127.0.0.1 Established 1 ")
	event("BGPSessionEstablished", "node node1")
	for _, want := range []string{"198.51.100.0/24", "(64513,7)"} {
		if out := ask("show", "route", "all"); !strings.Contains(out, want) {
			t.Errorf("the router lacks %s:\n%s", want, out)
		}
	}
	if out := ask("show", "protocols", "all", "node"); !strings.Contains(out, "Neighbor ID:      192.0.2.1") {
		t.Errorf("the router ID is not the node's address:\n%s", out)
	}

	if err := testutil.CollectAndCompare(r, strings.NewReader(`
# HELP fairlead_lb_bgp_announced_prefixes Routes that a BGP peer has been sent.
# TYPE fairlead_lb_bgp_announced_prefixes gauge
fairlead_lb_bgp_announced_prefixes{address="127.0.0.1",peer="top"} 1
# HELP fairlead_lb_bgp_session_up 1 while the session with a BGP peer is established.
# TYPE fairlead_lb_bgp_session_up gauge
fairlead_lb_bgp_session_up{address="127.0.0.1",peer="top"} 1
# HELP fairlead_lb_bgp_sessions_ended_total Sessions with a BGP peer that ended.
# TYPE fairlead_lb_bgp_sessions_ended_total counter
fairlead_lb_bgp_sessions_ended_total{address="127.0.0.1",peer="top"} 0
`)); err != nil {
		t.Error(err)
	}

	double := &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "zwei"}, Spec: peer.Spec}
	if _, err := objects.Peers.Create(t.Context(), double, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	status("zwei 127.0.0.1 Idle 0 this BGPPeer cannot be used: 127.0.0.1 is already the address of peer top")
	status("top 127.0.0.1 Established 1 ")
	if err := objects.Peers.Delete(t.Context(), "zwei", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	secret.StringData = map[string]string{"password": "wrong"}
	if _, err := client.CoreV1().Secrets(svc.SystemNamespace).Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	status("has another password")
	event("BGPSessionFailed", "has another password")
	if err := objects.Peers.Delete(t.Context(), "top", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	status("")
	testbed.Until(t, "the Secret not to be followed", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.secrets) > 0 {
			return errors.New("it is")
		}
		return nil
	})
}
