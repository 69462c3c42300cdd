package lb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/speaker"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// pools are the addresses of the tests, on the network of the hosts.
const pools = "192.168.77.100-192.168.77.199,fd00:77::1:0/120"

// bed is a network with an API server, a controller, and nodes with a speaker each.
type bed struct {
	testing.TB
	net    *testbed.Network
	api    *testbed.Host
	config *rest.Config // from the nodes
	local  *rest.Config // from the test
	client kubernetes.Interface
	lb     *v1.Client
	nodes  []*node
	wire   *arp.Listener
}

// node is a host with a speaker.
type node struct {
	bed  *bed
	host *testbed.Host
	name string
	mac  arp.MAC
	args speakerArgs
	// uptime is what the clocks that count from the machine's start are ahead by in the next process.
	uptime time.Duration
	*process.Process
	// command is what the process is, upWhen what it prints when it is up.
	command       func() *exec.Cmd
	upWhen        string
	dead, stopped bool // by TestNeverTwoOwnersOnTheWire
	lameduck      bool // the next process has --dns-lameduck at its default
}

func newBed(t *testing.T, nodes int) *bed {
	t.Helper()
	b := &bed{TB: t, net: testbed.NewNetwork(t)}
	b.api = b.net.Host("api")
	var l net.Listener
	b.api.Do(func() { l = b.api.ListenTCP(netip.AddrPortFrom(b.api.Addr4(), 6443)) })
	local := rest.CopyConfig(apiservertest.Start(t, func(o *apiserver.Options) {
		o.Listeners = append(o.Listeners, l.(*net.TCPListener))
	}))
	local.QPS = -1
	b.config = rest.CopyConfig(local)
	b.config.Host, b.config.ServerName = "https://"+b.api.Addr4().String()+":6443", "127.0.0.1"
	b.local, b.client = local, kubernetes.NewForConfigOrDie(local)
	var err error
	b.lb, err = v1.NewClient(local)
	b.must(err)
	b.control(local)
	b.wire = listenOn(t, b.net.Outside("client"))
	for i := range nodes {
		n := b.addNode("n" + string(rune('1'+i)))
		n.start()
	}
	return b
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// control runs the controller.
func (b *bed) control(config *rest.Config) {
	b.Helper()
	ranges, err := pool.ParseList(pools)
	b.must(err)
	started := make(chan struct{})
	c, err := lbcontroller.New(lbcontroller.Options{
		Config: config, Pools: []lbcontroller.FlagPool{{Name: "test", Ranges: ranges}}, Default: true,
		Started: sync.OnceFunc(func() { close(started) }),
	})
	b.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = c.Run(ctx) })
	b.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	select {
	case <-started:
	case <-time.After(testbed.Patience):
		b.Fatal("the controller does not start")
	}
}

func (b *bed) addNode(name string) *node {
	b.Helper()
	n := &node{bed: b, host: b.net.Host(name), name: name, upWhen: "started"}
	n.command = n.speaker
	_, err := b.client.CoreV1().Nodes().Create(b.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	b.must(err)
	n.mac = arp.MACOf(b, n.host, "eth0")
	n.args = speakerArgs{
		Node: name, Rate: 1, Peer: netip.AddrPortFrom(n.host.Addr4(), svc.SpeakerPort),
		Unhealthy: filepath.Join(b.TempDir(), "unhealthy"),
	}
	n.args.setServer(b.config)
	b.nodes = append(b.nodes, n)
	return n
}

// start starts the node's speaker, or its agent in a cluster.
func (n *node) start() {
	n.bed.Helper()
	n.Process = process.Start(n.bed, n.command())
	n.Says(n.upWhen)
}

// speaker is the command of the node's speaker.
func (n *node) speaker() *exec.Cmd {
	n.bed.Helper()
	text, err := json.Marshal(n.args)
	n.bed.must(err)
	var shift []string
	if seconds := fmt.Sprint(int(n.uptime.Seconds())); n.uptime > 0 && hasTimeNamespaces() {
		shift = []string{"unshare", "--time", "--boottime", seconds, "--monotonic", seconds, "--"}
	}
	argv := append(shift, os.Args[0])
	cmd := n.host.Command(context.Background(), argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), speakerEnv+"="+string(text))
	return cmd
}

// hasTimeNamespaces reports whether the kernel has them (time_namespaces(7), Linux 5.6).
func hasTimeNamespaces() bool {
	_, err := os.Stat("/proc/self/ns/time")
	return err == nil
}

// run runs a command on the node's host.
func (n *node) run(args ...string) {
	n.bed.Helper()
	if out, err := n.host.Command(context.Background(), args[0], args[1:]...).CombinedOutput(); err != nil {
		n.bed.Fatalf("%s: %s: %v: %s", n.name, strings.Join(args, " "), err, out)
	}
}

// cut loses everything that the node sends to another host, join ends that.
func (n *node) cut(to *testbed.Host) {
	n.run("ip", "route", "replace", "blackhole", to.Addr4().String()+"/32")
}
func (n *node) join(to *testbed.Host) {
	n.run("ip", "route", "flush", "exact", to.Addr4().String()+"/32")
}

// service makes a Service of type LoadBalancer and returns its addresses.
func (b *bed) service(name string, change ...func(*corev1.Service)) []netip.Addr {
	b.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80}}
	for _, f := range change {
		f(s)
	}
	_, err := b.client.CoreV1().Services("default").Create(b.Context(), s, metav1.CreateOptions{})
	b.must(err)
	var out []netip.Addr
	testbed.Until(b, "addresses for "+name, func() error {
		s, err := b.client.CoreV1().Services("default").Get(b.Context(), name, metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("none: %v", err)
		}
		out = nil
		for _, in := range s.Status.LoadBalancer.Ingress {
			out = append(out, netip.MustParseAddr(in.IP))
		}
		return nil
	})
	return out
}

// voters waits until the list has so many votes, all voters use it, and the witness, if it is one of them, is free.
func (b *bed) voters(votes int) {
	b.Helper()
	testbed.Until(b, fmt.Sprintf("%d votes", votes), func() error {
		m, err := b.client.CoreV1().ConfigMaps(svc.SystemNamespace).Get(b.Context(), svc.VotersConfigMap, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var l struct {
			Current struct {
				Version int64
				Voters  []struct{ Name string }
				Witness bool
			}
		}
		b.must(json.Unmarshal([]byte(m.Data["lists"]), &l))
		n := len(l.Current.Voters)
		if l.Current.Witness {
			n++
		}
		if n != votes {
			return fmt.Errorf("%s", m.Data["lists"])
		}
		for _, v := range l.Current.Voters {
			s, err := b.lb.Speakers.Get(b.Context(), v.Name, metav1.GetOptions{})
			if err != nil || s.Status.VoterVersion != l.Current.Version {
				return fmt.Errorf("%s uses list %d, not %d (%v)", v.Name, s.Status.VoterVersion, l.Current.Version, err)
			}
		}
		if l.Current.Witness {
			lease, err := b.client.CoordinationV1().Leases(svc.SystemNamespace).Get(b.Context(), "fairlead-lb-witness", metav1.GetOptions{})
			if err != nil || *lease.Spec.HolderIdentity != "" {
				return fmt.Errorf("the witness is not free: %v", err)
			}
		}
		return nil
	})
}

// owner waits until a node of those given answers for an address, and returns it.
func (b *bed) owner(a netip.Addr, of ...*node) (found *node) {
	b.Helper()
	testbed.Until(b, "an owner of "+a.String(), func() error {
		mac, ok := b.wire.Who(a)
		if !ok {
			return errors.New("no machine answers")
		}
		for _, n := range of {
			if n.mac == mac {
				found = n
				return nil
			}
		}
		return fmt.Errorf("%x answers", mac)
	})
	return found
}

// What a take-over may take: promises of a dead node last for a second, the witness of two nodes for one and a half; one
// that stops gives its addresses to another one in some hundredths. A busy machine gets several times as much.
const (
	expireWithin  = 10 * time.Second
	releaseWithin = 5 * time.Second
	// After SIGTERM the others first keep the addresses for the next process.
	awayWithin = expireWithin + speaker.AwayTime
)

// tookOver waits until another node has taken an address over, which it must have done within a time from begin.
func (b *bed) tookOver(what string, a netip.Addr, from *node, begin time.Time, within time.Duration) {
	b.Helper()
	next := b.owner(a, b.others(from)...)
	for _, x := range b.wire.Since(a, begin) {
		if x.MAC != next.mac {
			continue
		}
		took := x.At.Sub(begin)
		b.Logf("%s: %s took %s over from %s after %s", what, next.name, a, from.name, took.Round(time.Millisecond))
		if took > within {
			b.Errorf("%s: that is more than %s", what, within)
		}
		return
	}
}

// kept fails the test if a node other than the owner claimed an address within a time from begin.
func (b *bed) kept(a netip.Addr, owner *node, begin time.Time, lasts time.Duration) {
	b.Helper()
	for _, x := range b.wire.Since(a, begin) {
		if after := x.At.Sub(begin); x.MAC != owner.mac && after < lasts {
			b.Errorf("%x claimed %s after %s, in the %s that it is kept for %s", x.MAC, a, after, lasts, owner.name)
		}
	}
}

// others returns the nodes but for one.
func (b *bed) others(but *node) (out []*node) {
	for _, n := range b.nodes {
		if n != but {
			out = append(out, n)
		}
	}
	return out
}

// event waits for an Event on a Service.
func (b *bed) event(service, reason string) string {
	b.Helper()
	var message string
	testbed.Until(b, "an Event "+reason, func() error {
		list, err := b.client.CoreV1().Events("default").List(b.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == service && e.Reason == reason {
				message = e.Message
				return nil
			}
		}
		return fmt.Errorf("none among %d", len(list.Items))
	})
	return message
}

// label sets or removes a label of the node's object.
func (n *node) label(key string, set bool) {
	n.bed.Helper()
	api := n.bed.client.CoreV1().Nodes()
	testbed.Until(n.bed, "the label to be written", func() error {
		o, err := api.Get(n.bed.Context(), n.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if delete(o.Labels, key); set {
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			o.Labels[key] = ""
		}
		if _, err = api.Update(n.bed.Context(), o, metav1.UpdateOptions{}); apierrors.IsConflict(err) {
			return err
		}
		n.bed.must(err)
		return nil
	})
}

// listenOn listens for claims of addresses on a machine outside of the cluster.
func listenOn(t testing.TB, h *testbed.Host) *arp.Listener {
	return arp.Listen(t, h, "eth0", h.Addr4())
}

// kill9 ends the node's speaker without a chance to do anything.
func (n *node) kill9() {
	n.bed.Helper()
	n.Signal(syscall.SIGKILL)
	_ = n.Wait()
}

// cordon sets whether the node's object is unschedulable.
func (n *node) cordon(is bool) {
	n.bed.Helper()
	patch := fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, is)
	_, err := n.bed.client.CoreV1().Nodes().Patch(n.bed.Context(), n.name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	n.bed.must(err)
}

// eligible waits until a node's speaker reports that it may announce.
func (b *bed) eligible(n *node) {
	b.Helper()
	testbed.Until(b, n.name+" to be eligible", func() error {
		s, err := b.lb.Speakers.Get(b.Context(), n.name, metav1.GetOptions{})
		if err == nil && !s.Status.Eligible {
			err = errors.New(s.Status.Reason)
		}
		return err
	})
}

// rebalanced asks for addresses to be spread, and again every 10 s since a node may return late, until f returns nil.
func (b *bed) rebalanced(what string, f func() error) {
	b.Helper()
	var asked time.Time
	testbed.Until(b, what, func() error {
		if time.Since(asked) > 10*time.Second {
			asked = time.Now()
			b.must(lbview.Rebalance(b.Context(), b.client))
		}
		return f()
	})
}

// claimed reports whether a node has claimed an address since a time.
func (b *bed) claimed(a netip.Addr, n *node, since time.Time) bool {
	return slices.ContainsFunc(b.wire.Since(a, since), func(c arp.Claim) bool { return c.MAC == n.mac })
}

// claimedByOthers returns who but a node has claimed an address since a time.
func (b *bed) claimedByOthers(a netip.Addr, but *node, since time.Time) (who []string) {
	for _, n := range b.others(but) {
		if b.claimed(a, n, since) {
			who = append(who, n.name)
		}
	}
	return who
}

// restartMovesNothing restarts the owner of an address and fails if another node claims it, and returns the owner then. The others
// keep it for AwayTime. On a busy machine the next process may take longer: then it is tried again.
func (b *bed) restartMovesNothing(a netip.Addr, owner *node) *node {
	b.Helper()
	for began := time.Now(); time.Since(began) < testbed.Patience; {
		begin := time.Now()
		owner.Signal(syscall.SIGTERM)
		if err := owner.Wait(); err != nil {
			b.Errorf("SIGTERM: %v", err)
		}
		ended := time.Now()
		owner.start()
		testbed.Until(b, "the next process to claim "+a.String()+", or another node", func() error {
			b.wire.Who(a)
			for _, n := range b.nodes {
				if b.claimed(a, n, ended) {
					return nil
				}
			}
			return errors.New("no node does")
		})
		took := time.Since(begin)
		others := b.claimedByOthers(a, owner, begin)
		b.Logf("the process ended after %s, and the address was claimed again after %s", ended.Sub(begin).Round(time.Millisecond),
			took.Round(time.Millisecond))
		if took < speaker.AwayTime {
			if len(others) > 0 {
				b.Errorf("while it was restarted %v answered", others)
			}
			return b.owner(a, b.nodes...)
		}
		b.voters(len(b.nodes))
		owner = b.owner(a, b.nodes...)
	}
	b.Errorf("in %s no process answered within %s of the end of the one before", testbed.Patience, speaker.AwayTime)
	return owner
}
