package status

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/proxy"
)

// service is a Service of namespace default with port 80 to a target.
func service(name string, target intstr.IntOrString, selector ...string) corev1.Service {
	return corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Selector: pairs(selector), Type: corev1.ServiceTypeClusterIP, Ports: []corev1.ServicePort{{Port: 80, TargetPort: target}},
		},
	}
}

// pairs makes a map of key=value.
func pairs(of []string) map[string]string {
	out := map[string]string{}
	for _, p := range of {
		k, v, _ := strings.Cut(p, "=")
		out[k] = v
	}
	return out
}

func labelled(name string, labels ...string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: pairs(labels)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 9376}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// judged returns the problems of Services without endpoints beside Pods.
func judged(services []corev1.Service, pods []corev1.Pod) []string {
	r := &Report{Nodes: []nodeReport{{Name: "n", Ready: true}}, Services: serviceReports(services, nil)}
	r.judgeServices(services, newPodIndex(pods, true))
	return r.Problems
}

func TestStatusNamesWhatASelectorMisses(t *testing.T) {
	pods := []corev1.Pod{
		labelled("a", "app=web", "tier=front"), labelled("b", "app=web", "tier=front"), labelled("c", "app=web", "tier=back"),
		labelled("d", "name=shop"), labelled("e", "app=api", "tier=back"),
	}
	elsewhere := labelled("f", "app=Web")
	elsewhere.Namespace = "other"
	ended := labelled("g", "app=Web")
	ended.Status.Phase = corev1.PodSucceeded
	pods = append(pods, elsewhere, ended)
	for _, x := range []struct {
		want     string
		selector []string
	}{
		{"(no Pod has app=Web (3 have app=web))", []string{"app=Web"}},
		{"(no Pod has App=web (3 have app=web))", []string{"App=web"}},
		{"(no Pod has app=wbe (3 have app=web))", []string{"app=wbe"}},
		{"(no Pod has app=shop (1 has name=shop))", []string{"app=shop"}},
		{"(no Pod has tier=middle (2 have tier=front))", []string{"app=web", "tier=middle"}},
		{"(no Pod has app=something)", []string{"app=something"}},
		{"(no Pod has all of app=api,tier=front (1 has app=api, 2 have tier=front))", []string{"app=api", "tier=front"}},
		{"(selector app=web, 0 endpoints not ready)", []string{"app=web"}},
	} {
		got := judged([]corev1.Service{service("s", intstr.FromInt32(9376), x.selector...)}, pods)
		want := "service default/s has no ready endpoint: connections are refused " + x.want
		if !slices.Equal(got, []string{want}) {
			t.Errorf("selector %s:\ngot  %q\nwant %q", x.selector, got, want)
		}
	}
}

func TestStatusNamesPortsThatNoPodHas(t *testing.T) {
	silent := labelled("s", "app=silent")
	silent.Spec.Containers[0].Ports = nil
	udp := labelled("u", "app=udp")
	udp.Spec.Containers[0].Ports[0].Protocol = corev1.ProtocolUDP
	sidecar := labelled("c", "app=sidecar")
	always := corev1.ContainerRestartPolicyAlways
	sidecar.Spec.InitContainers = []corev1.Container{{
		Name: "side", RestartPolicy: &always, Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9090}},
	}}
	pods := []corev1.Pod{labelled("a", "app=web"), labelled("b", "app=web"), silent, udp, sidecar}
	for _, x := range []struct {
		app, want string
		target    intstr.IntOrString
	}{
		{"web", "", intstr.FromInt32(9376)},
		{"web", "", intstr.FromString("http")},
		{"web", "port 80 leads to port 8080, which none of its Pods has (they have http=9376)", intstr.FromInt32(8080)},
		{"web", "port 80 leads to port 80, which none of its Pods has (they have http=9376)", intstr.IntOrString{}},
		{"web", "port 80 leads to port htpp, which none of its Pods has (they have http=9376)", intstr.FromString("htpp")},
		{"silent", "", intstr.FromInt32(8080)},
		{"silent", "port 80 leads to port http, which none of its Pods has (they declare none)", intstr.FromString("http")},
		{"udp", "", intstr.FromInt32(8080)}, // it declares no port of TCP
		{"sidecar", "", intstr.FromString("metrics")},
		{"sidecar", "", intstr.FromInt32(9090)},
	} {
		got := judged([]corev1.Service{service("s", x.target, "app="+x.app)}, pods)[1:] // the first: no endpoints
		if x.want == "" && len(got) > 0 || x.want != "" && !slices.Equal(got, []string{"service default/s: " + x.want}) {
			t.Errorf("port %s of %s:\ngot  %q\nwant %q", &x.target, x.app, got, x.want)
		}
	}
}

func TestStatusNamesServicesWithoutEndpoints(t *testing.T) {
	empty := service("empty", intstr.IntOrString{})
	name := service("name", intstr.IntOrString{})
	name.Spec.Type = corev1.ServiceTypeExternalName
	class := "example.com/lb"
	pending, waiting, given := service(
		"pending",
		intstr.IntOrString{},
	), service(
		"waiting",
		intstr.IntOrString{},
	), service(
		"given",
		intstr.IntOrString{},
	)
	for _, s := range []*corev1.Service{&pending, &waiting, &given} {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
	}
	waiting.Spec.LoadBalancerClass = &class
	given.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	kubernetes, front := service("kubernetes", intstr.IntOrString{}), service("front", intstr.IntOrString{})
	front.Labels = map[string]string{names.FrontLabel: names.FrontGateway}
	got := judged([]corev1.Service{empty, name, pending, waiting, given, kubernetes, front}, nil)
	none := " has no selector and no endpoints: connections are refused until it gets one or the other"
	want := []string{
		"service default/empty" + none,
		"service default/pending has no load balancer address: no provider has given it one",
		"service default/pending" + none,
		"service default/waiting has no load balancer address: no provider of class example.com/lb has given it one",
		"service default/waiting" + none,
		"service default/given" + none,
		"service default/kubernetes has no endpoints: Pods cannot reach the API; " +
			"start the server with an address that they reach, --bind-address 127.0.0.1,ADDRESS",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestStatusNamesPodsThatDoNotRun(t *testing.T) {
	now := time.Now()
	pod := func(name string, age time.Duration, change func(*corev1.Pod)) corev1.Pod {
		p := labelled(name)
		p.CreationTimestamp = metav1.NewTime(now.Add(-age))
		p.Status.Phase = corev1.PodPending
		change(&p)
		return p
	}
	waits := func(reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{
				Name: "main", RestartCount: 4, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
				LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3}},
			}}
		}
	}
	noRoom := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no node matches"}}
	}
	assigned := func(p *corev1.Pod) { p.Spec.NodeName = "n1" }
	r := &Report{}
	r.judgePods([]corev1.Pod{
		pod("loops", time.Hour, waits("CrashLoopBackOff", "back-off 40s restarting")),
		pod("starts", time.Hour, waits("ContainerCreating", "")),
		pod("fresh", time.Second, func(*corev1.Pod) {}),
		pod("assigned", time.Minute, assigned),
		pod("noroom", 0, noRoom),
		pod("ended", time.Hour, func(p *corev1.Pod) { waits("CrashLoopBackOff", "")(p); p.Status.Phase = corev1.PodFailed }),
		pod("going", time.Hour, func(p *corev1.Pod) { d := metav1.NewTime(now); p.DeletionTimestamp = &d }),
	}, now)
	want := []string{
		"pod default/loops: CrashLoopBackOff: back-off 40s restarting (container main, 4 restarts, last exit code 3)",
		"pod default/starts is Pending: ContainerCreating, last exit code 3",
		"pod default/assigned is Pending: node n1 has not started it",
		"pod default/noroom is Pending: no node matches",
	}
	if !slices.Equal(r.Problems, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(r.Problems, "\n"), strings.Join(want, "\n"))
	}
}

func TestStatusShowsANodesOwnMessage(t *testing.T) {
	node := func(name string, conditions ...corev1.NodeCondition) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: conditions}}
	}
	is := func(kind corev1.NodeConditionType, s corev1.ConditionStatus, message string) corev1.NodeCondition {
		return corev1.NodeCondition{Type: kind, Status: s, Message: message}
	}
	ready := is(corev1.NodeReady, corev1.ConditionTrue, "")
	nodes := []corev1.Node{
		node("own", is(corev1.NodeReady, corev1.ConditionFalse, "the state directory is read-only")),
		node("silent", is(corev1.NodeReady, corev1.ConditionUnknown, "heartbeat missed")),
		node(
			"cut",
			ready,
			is("fairlead.dev/PodsRouted", corev1.ConditionFalse, "no route to n2"),
			is("fairlead.dev/PodsSourcesChecked", corev1.ConditionFalse, "pods of this node can send with source addresses that are not their own"),
			is("fairlead.dev/Other", corev1.ConditionTrue, ""),
		),
		node(
			"full",
			ready,
			is(corev1.NodeDiskPressure, corev1.ConditionTrue, "5% left"),
			is(corev1.NodeMemoryPressure, corev1.ConditionFalse, ""),
		),
	}
	r := &Report{Nodes: nodeReports(nodes, nil, "")}
	r.judgeNodes(nodes)
	want := []string{
		"node own is not Ready: the state directory is read-only",
		"node silent is not Ready: its agent does not run, or cannot reach the server",
		"node cut: fairlead.dev/PodsRouted is False: no route to n2",
		"node cut: fairlead.dev/PodsSourcesChecked is False: pods of this node can send with source addresses that are not their own",
		"node full: DiskPressure is True: 5% left",
	}
	if !slices.Equal(r.Problems, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(r.Problems, "\n"), strings.Join(want, "\n"))
	}
}

// Programs and the page find out which Service a problem is about, also where a node names it.
func TestProblemsOfServices(t *testing.T) {
	web := service("web", intstr.FromInt32(80), "app=web")
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}}
	r := &Report{Nodes: nodeReports([]corev1.Node{n}, nil, ""), Services: serviceReports([]corev1.Service{web}, nil)}
	r.Nodes[0].Programmed = &proxy.Status{Problems: []proxy.Problem{{Service: "default/other", Message: "rejected"}}}
	r.judgeNodes([]corev1.Node{n})
	r.judgeServices([]corev1.Service{web}, newPodIndex(nil, true))
	want := []serviceProblem{
		{"default/other", "node n1: service default/other: rejected"},
		{"default/web", "service default/web has no ready endpoint: connections are refused (no Pod has app=web)"},
	}
	if !slices.Equal(r.ServiceProblems, want) || !slices.Contains(r.Problems, want[0].Text) || !slices.Contains(r.Problems, want[1].Text) {
		t.Errorf("got %q\nof %q\nwant %q", r.ServiceProblems, r.Problems, want)
	}
}

// Endpoints that were written by hand are asked, in reach and bounded in number, time
// and at once.
func TestStatusProbesEndpointsWrittenByHand(t *testing.T) {
	hand, controlled, selecting := service(
		"hand",
		intstr.IntOrString{},
	), service(
		"dns",
		intstr.IntOrString{},
	), service(
		"web",
		intstr.IntOrString{},
		"a=b",
	)
	slice := func(service, by, addr string, port int32, protocol corev1.Protocol) discoveryv1.EndpointSlice {
		return discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Labels: map[string]string{
				discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: by,
			}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}}},
			Ports:       []discoveryv1.EndpointPort{{Port: &port, Protocol: &protocol}},
		}
	}
	tcp, udp := corev1.ProtocolTCP, corev1.ProtocolUDP
	nodes := []corev1.Node{{
		Spec:   corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.10"}}},
	}}
	all := []discoveryv1.EndpointSlice{
		slice("hand", "", "192.0.2.1", 80, tcp), slice("hand", "", "192.0.2.1", 80, tcp), slice("hand", "", "192.0.2.2", 53, udp),
		slice("hand", "endpointslicemirroring-controller.k8s.io", "192.0.2.3", 80, tcp),
		slice("hand", "", "10.244.1.7", 80, tcp), slice("hand", "", "192.0.2.10", 80, tcp),
		slice("dns", "dns.fairlead.dev", "192.0.2.4", 53, tcp), slice("web", "endpointslice-controller.k8s.io", "192.0.2.5", 80, tcp),
		slice("kubernetes", "", "192.0.2.6", 6443, tcp),
	}
	services := []corev1.Service{hand, controlled, selecting, service("kubernetes", intstr.IntOrString{})}
	addresses := func(local ...netip.Addr) (out []string) {
		for _, t := range handMade(services, all, nodes, local) {
			out = append(out, t.service+" "+t.at.String())
		}
		return out
	}
	if got, want := fmt.Sprint(addresses()), "[default/hand 192.0.2.1:80 default/hand 192.0.2.3:80]"; got != want {
		t.Errorf("elsewhere: got %s, want %s", got, want)
	}
	if got := addresses(netip.MustParseAddr("192.0.2.10")); len(got) != 4 {
		t.Errorf("on the node: %s, want its Pod and the node itself, too", got)
	}

	synctest.Test(t, testProbesAreBounded)
}

func testProbesAreBounded(t *testing.T) {
	var now, most, dialled atomic.Int64
	p := &prober{dial: func(ctx context.Context, _, address string) (net.Conn, error) {
		dialled.Add(1)
		n := now.Add(1)
		defer now.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		if strings.HasPrefix(address, "10.0.0.") {
			one, other := net.Pipe()
			other.Close()
			return one, nil
		}
		<-ctx.Done() // until its time is over
		return nil, ctx.Err()
	}}
	var targets []target
	for i := range 2 * maxProbes {
		targets = append(targets, target{"default/hand", netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 7), byte(i)}), 80)})
	}
	got := p.problems(t.Context(), share(targets))
	if len(got) != maxProbes-128 || dialled.Load() != maxProbes || most.Load() > probeAtOnce {
		t.Errorf("%d problems, %d connections, %d at once", len(got), dialled.Load(), most.Load())
	}
	want := "service default/hand: its endpoint 10.0.1.128:80, written by hand, does not answer this machine: no answer within 1s"
	if !slices.Contains(got, serviceProblem{"default/hand", want}) {
		t.Errorf("%q is not among %q …", want, got[:min(3, len(got))])
	}
}

// A machine that is no node connects to nothing unless it is asked to, and endpoints of
// one namespace do not keep those of another from being probed.
func TestProbesAreShared(t *testing.T) {
	var mu sync.Mutex
	dialled := map[string]bool{}
	p := &prober{local: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, dial: func(_ context.Context, _, address string) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		dialled[address] = true
		return nil, errors.New("refused")
	}}
	node := []corev1.Node{{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Address: "192.0.2.9"}}}}}
	var all []target
	for i := range 2 * maxProbes {
		all = append(all, target{"a/many", netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)})
	}
	all = append(all, target{"b/one", netip.MustParseAddrPort("10.9.9.9:80")})
	probed := func() (int, *Report) {
		r := &Report{}
		clear(dialled)
		r.probe(t.Context(), p, node, all)
		return len(dialled), r
	}
	n, r := probed()
	if n != 0 || r.NotProbed != len(all) || len(r.Problems) != 0 {
		t.Errorf("a machine that is no node connects to %d endpoints, and reports %d as not probed", n, r.NotProbed)
	}
	for _, known := range []bool{false, true} {
		var out strings.Builder
		if err := r.print(&out); err != nil || strings.HasSuffix(out.String(), "\nnothing is wrong\n") != known {
			t.Errorf("all known: %t: %v\n%s", known, err, &out)
		}
		r.NotProbed = 0
	}
	want := len(all) - maxProbes
	p.anywhere = true
	if n, r := probed(); n != maxProbes || r.NotProbed != want || !dialled["10.9.9.9:80"] {
		t.Errorf("asked to: %d endpoints, %d not; that of the other namespace: %t", n, r.NotProbed, dialled["10.9.9.9:80"])
	}
	p.anywhere, node[0].Status.Addresses[0].Address = false, "192.0.2.1"
	if n, r := probed(); n != maxProbes || r.NotProbed != want {
		t.Errorf("a node connects to %d endpoints, and reports %d as not probed", n, r.NotProbed)
	}
}

// What is looked at grows with Services and Pods, not with their product: here that is
// 10,000 times 10,000, twice.
func TestStatusOfALargeCluster(t *testing.T) {
	var services []corev1.Service
	var pods []corev1.Pod
	for i := range 10000 {
		s := service(fmt.Sprint("s", i), intstr.FromString("nope"), "app=web")
		if i%2 == 0 {
			s.Spec.Selector = map[string]string{"app": "web", "tier": "none"}
		}
		services = append(services, s)
	}
	for i := range 10000 {
		pods = append(pods, labelled(fmt.Sprint("p", i), "app=web", fmt.Sprint("tier=t", i)))
	}
	begin := time.Now()
	got := judged(services, pods)
	if len(got) != 15000 {
		t.Errorf("%d problems, want 15000", len(got))
	}
	t.Logf("judged in %s", time.Since(begin))
}
