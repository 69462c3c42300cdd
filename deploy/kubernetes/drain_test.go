package kubernetes

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// drains is a rig with the endpoint controllers, the manifest drain.yaml, and a proxy on each of two nodes.
type drains struct {
	*rig
	controller *process.Process            // of drains
	proxies    map[string]*process.Process // by node
	service    netip.AddrPort
	steps      []string // of docs/kubernetes.md
	made       int
}

func newDrains(t *testing.T) *drains {
	t.Helper()
	d := &drains{rig: newRig(t), proxies: map[string]*process.Process{}}
	if v, err := d.client.Discovery().ServerVersion(); err != nil {
		t.Fatal(err)
	} else if minor, err := strconv.Atoi(v.Minor); err == nil && process.Kubernetes() && minor < 36 {
		t.Skipf("Kubernetes 1.%d does not serve MutatingAdmissionPolicies of admissionregistration.k8s.io/v1, which the manifest needs; "+
			"'make kubernetes-test' without MINOR runs this test", minor)
	}
	d.kubectl("apply", "-f", "controllers.yaml", "-f", "proxy.yaml")
	d.steps = blocks(section(t, "kubernetes.md", "Rollouts without `preStop: sleep`"))
	if len(d.steps) != 4 {
		t.Fatalf("the section has the commands %q", d.steps)
	}
	patch, _, _ := strings.Cut(d.steps[1], "kubectl -n kube-system rollout") // for which no controller works
	d.shell(d.steps[0], patch)
	d.wantFlows()
	for _, node := range []*testbed.Host{d.node, d.node2} {
		d.register(node)
	}
	for _, name := range []string{"fairlead-controllers", "fairlead-drain"} {
		c, err := d.client.AppsV1().Deployments("kube-system").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		d.controller = d.run(d.node, c.Spec.Template)
	}
	p, err := d.client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "fairlead-proxy", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.Spec.Template.Spec.Volumes = slices.DeleteFunc(p.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool { return v.ConfigMap != nil })
	for node, mode := range map[*testbed.Host]string{d.node: "nft", d.node2: "iptables"} {
		args := slices.Clone(p.Spec.Template.Spec.Containers[0].Args)
		for i := range args {
			if strings.HasPrefix(args[i], "--config=") { // there is no ConfigMap
				args[i] = "--cluster-cidr=10.244.0.0/16"
			}
		}
		template := p.Spec.Template.DeepCopy()
		template.Spec.Containers[0].Args = append(args, "--mode="+mode, "--drain-wait=1h")
		d.proxies[node.Name()] = d.run(node, *template)
	}
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{barrier.AskAnnotation: "true"}}}
	s.Spec.Selector = map[string]string{"app": "web"}
	s.Spec.Ports = []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(9376)}}
	if s, err = d.client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	d.service = netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), 80)
	return d
}

// server is a Pod of the Service, whose process ends at once at SIGTERM.
type server struct {
	*corev1.Pod
	host    *testbed.Host
	process *process.Process
}

// serve runs a Pod, and waits until both nodes send connections to it.
func (d *drains) serve(node *testbed.Host, drain string) *server {
	d.Helper()
	return d.serveHook(node, drain, nil)
}

// serveHook is serve with hooks of the Pod's own, which the policy leaves as they are.
func (d *drains) serveHook(node *testbed.Host, drain string, hook *corev1.Lifecycle) *server {
	d.Helper()
	d.made++
	name := fmt.Sprintf("web-%d", d.made)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "web"}}}
	if drain != "" {
		p.Annotations = map[string]string{svc.DrainAnnotation: drain}
	}
	p.Spec = corev1.PodSpec{
		NodeName: node.Name(), TerminationGracePeriodSeconds: new(int64(600)),
		Containers: []corev1.Container{{Name: "web", Image: "web", Ports: []corev1.ContainerPort{{ContainerPort: 9376}}, Lifecycle: hook}},
	}
	p, err := d.client.CoreV1().Pods("default").Create(d.Context(), p, metav1.CreateOptions{})
	if err != nil {
		d.Fatal(err)
	}
	s := &server{host: node.Pod(name)}
	s.process = process.Start(d.T, s.host.Command(context.Background(), process.Program("backend"), "-abrupt"))
	d.Cleanup(s.process.End) // SIGTERM is not an orderly end for it
	testbed.Until(d.T, "the server of "+name, func() error { return get(node, netip.AddrPortFrom(s.host.Addr4(), 9376)) })
	ip := s.host.Addr4().String()
	p.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}
	if s.Pod, err = d.client.CoreV1().Pods("default").UpdateStatus(d.Context(), p, metav1.UpdateOptions{}); err != nil {
		d.Fatal(err)
	}
	return s
}

// programmed waits until all nodes have the present endpoints, which have n Pods.
func (d *drains) programmed(n int) {
	d.Helper()
	testbed.Until(d.T, fmt.Sprintf("%d endpoints", n), func() error {
		out := d.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=web", "-o", "jsonpath={.items[*].endpoints[*].addresses}")
		if got := len(strings.Fields(out)); got != n {
			return fmt.Errorf("%d: %s", got, out)
		}
		return nil
	})
	d.kubectl("wait", "--for=condition="+barrier.Programmed, "--timeout=2m", "service/web")
}

// remove deletes a Pod as an administrator, and ends it as its kubelet: the preStop hooks of the containers, then SIGTERM.
// The channel is closed when the process has ended.
func (d *drains) remove(s *server) <-chan struct{} {
	d.Helper()
	pods := d.client.CoreV1().Pods("default")
	if err := pods.Delete(d.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
		d.Fatal(err)
	}
	out := make(chan struct{})
	go func() {
		defer close(out)
		if err := d.hooks(s); err != nil {
			d.Logf("the hooks of %s: %v", s.Name, err) // a kubelet makes an Event of it, and goes on
		}
		s.process.Signal(syscall.SIGTERM)
		_ = s.process.Wait()
		_ = pods.Delete(context.WithoutCancel(d.Context()), s.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	}()
	return out
}

// hooks runs the preStop hooks of a Pod: with the code of the real kubelet, if 'make migrate-test' has built it.
func (d *drains) hooks(s *server) error {
	program, err := filepath.Abs("../../bench/bin/kube-prestop")
	if err == nil {
		_, err = os.Stat(program)
	}
	if err != nil {
		for i := range s.Spec.Containers {
			if l := s.Spec.Containers[i].Lifecycle; l != nil && l.PreStop != nil && l.PreStop.HTTPGet != nil {
				if _, err := d.hook(s, l.PreStop.HTTPGet); err != nil {
					return err
				}
			}
		}
		return nil
	}
	text, err := json.Marshal(s.Pod)
	if err != nil {
		return err
	}
	cmd := s.host.Node().Command(d.Context(), program)
	cmd.Stdin = bytes.NewReader(text)
	out, err := process.Try(cmd)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return err
}

// hook sends the request of a preStop hook, from the node, as a kubelet does (pkg/kubelet/lifecycle/handlers.go).
func (d *drains) hook(s *server, ask *corev1.HTTPGetAction) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		at, err := netip.ParseAddrPort(addr)
		if err != nil {
			return nil, err
		}
		return s.host.Node().Dial(ctx, svc.TCP, at)
	}}
	url := fmt.Sprintf("http://%s%s", net.JoinHostPort(s.Status.PodIP, ask.Port.String()), ask.Path)
	req, err := http.NewRequestWithContext(d.Context(), http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return strings.TrimSpace(string(text)), err
}

// get opens a connection for one request.
func get(from *testbed.Host, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := from.Dial(ctx, svc.TCP, to)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && !strings.Contains(line, " 200 ") {
		err = fmt.Errorf("answered %q", line)
	}
	return err
}

// clients open connections at a steady rate.
type clients struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	began  time.Time
	made   atomic.Int64
	mu     sync.Mutex
	failed []failure
}

type failure struct {
	begun time.Time
	from  string
	err   error
}

// maxOpen bounds the connections of a machine that is slower than the rate; the others are left out.
const maxOpen = 2000

// clients begins to make a number of connections in a second.
func (d *drains) clients(rate int, from ...*testbed.Host) *clients {
	ctx, stop := context.WithCancel(context.Background())
	c := &clients{stop: stop, began: time.Now()}
	open := make(chan struct{}, maxOpen)
	for _, host := range from {
		c.wg.Go(func() {
			pace := time.NewTicker(time.Duration(len(from)) * time.Second / time.Duration(rate))
			defer pace.Stop()
			for ; ctx.Err() == nil; <-pace.C {
				select {
				case open <- struct{}{}:
				default:
					continue
				}
				begun := time.Now()
				c.wg.Go(func() {
					defer func() { <-open }()
					c.made.Add(1)
					if err := get(host, d.service); err != nil {
						c.mu.Lock()
						defer c.mu.Unlock()
						c.failed = append(c.failed, failure{begun, host.Name(), err})
					}
				})
			}
		})
	}
	d.Cleanup(func() { stop(); c.wg.Wait() })
	return c
}

// since returns the failures of connections that were begun after a time.
func (c *clients) since(t time.Time) (out []failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.failed {
		if f.begun.After(t) {
			out = append(out, f)
		}
	}
	return out
}

// inFlight is how long before the end of a process a connection may have begun whose request it does not answer any more: at
// SIGTERM it ends at once, and this machine may be busy.
const inFlight = 3 * time.Second

// Pods end when every node has stopped sending to them, though their processes end at once at SIGTERM and a node is slow;
// without the hook clients fail. The hook is the policy's, and asks the proxy of the node in two modes.
func TestDrain(t *testing.T) {
	d := newDrains(t)
	d.checkPolicy()
	olds := []*server{d.serve(d.node, ""), d.serve(d.node2, ""), d.serve(d.node, svc.DrainOff), d.serve(d.node, "")}
	d.programmed(len(olds))
	for _, host := range []*testbed.Host{d.node, d.node2} {
		testbed.Until(t, "the Service on "+host.Name(), func() error { return get(host, d.service) })
	}
	d.checkReach(olds[0])
	d.checkFlows(olds[0])
	c := d.clients(size(t, "FAIRLEAD_TEST_RATE", 200), d.node, d.node2)
	var ends []time.Time
	rolling := olds[:2]
	replace := func(hook *corev1.Lifecycle) (waited time.Duration) {
		old := rolling[0]
		rolling = []*server{rolling[1], d.serveHook(old.host.Node(), "", hook)}
		d.programmed(len(olds) + 1)
		begun := time.Now()
		testbed.Receive(t, "the end of "+old.Name, d.remove(old))
		ends = append(ends, time.Now())
		return time.Since(begun)
	}
	var waited, slept time.Duration
	replacements := size(t, "FAIRLEAD_TEST_REPLACEMENTS", 2)
	for range replacements {
		waited += replace(nil)
	}
	t.Logf("%d replacements, whose Pods took %s each to end", replacements, (waited / time.Duration(replacements)).Round(time.Millisecond))
	if replacements > 2 { // for figures: the hook that teams add otherwise
		sleep := &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}}
		replace(sleep)
		replace(sleep)
		for range 2 {
			slept += replace(nil)
		}
		t.Logf("2 replacements with preStop: sleep 5, whose Pods took %s each to end", (slept / 2).Round(time.Millisecond))
	}
	t.Logf("waits on node1:\n%s", process.Output(t, d.node.Command(t.Context(), "bash", "-c",
		"curl -s http://127.0.0.1:10249/metrics | grep -E '^fairlead_prestop_(answers|wait_seconds_(sum|count))'")))
	// A slow node holds the Pod, and only as long as it is slow.
	slow := d.proxies["node2"]
	awaited := d.awaited()
	begun := time.Now()
	slow.Signal(syscall.SIGSTOP)
	ended := d.remove(olds[3])
	testbed.Until(t, "the report of the other node", func() error {
		if want, has := d.awaited(), d.reported("node1"); want == awaited || !has.Covers(want) {
			return fmt.Errorf("awaited are %v, and node1 has %v", want, has)
		}
		return nil
	})
	d.controller.Says("nodes are late to report .* nodes=node2")
	if closed(ended) && time.Since(begun) < 5*time.Second { // after 10 s nobody waits for a node that is not heard of
		t.Error("the Pod has ended although node2 may still send to it")
	}
	slow.Signal(syscall.SIGCONT)
	testbed.Receive(t, "the end of "+olds[3].Name, ended)
	ends = append(ends, time.Now())
	d.programmed(len(olds) - 1)

	// The control has no hook.
	control := time.Now()
	slow.Signal(syscall.SIGSTOP)
	testbed.Receive(t, "the end of "+olds[2].Name, d.remove(olds[2]))
	testbed.Until(t, "failures without the hook", func() error {
		if len(c.since(control)) == 0 {
			return errors.New("none")
		}
		return nil
	})
	slow.Signal(syscall.SIGCONT)
	c.stop()
	stopped := time.Now()
	c.wg.Wait()
	late := 0
	for _, f := range c.failed {
		switch {
		case f.begun.After(control):
		case slices.ContainsFunc(ends, func(end time.Time) bool { return f.begun.After(end.Add(-inFlight)) && f.begun.Before(end) }):
			late++
		default:
			t.Errorf("a connection of %s at %s: %v", f.from, f.begun.Format(time.TimeOnly+".000"), f.err)
		}
	}
	t.Logf("%d connections, %.0f a second; %d failed without the hook, %d in flight at an end with it", c.made.Load(),
		float64(c.made.Load())/stopped.Sub(c.began).Seconds(), len(c.since(control)), late)
	d.checkRights()
	for _, account := range []string{"fairlead-drain", "fairlead-hubble-relay", "fairlead-proxy"} {
		d.checkUnused(account)
	}
	d.checkGone(d.serve(d.node, ""))
	d.shell(d.steps[3])
}

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// awaited is what the controller asks nodes to report, and reported what one has reported.
func (d *drains) awaited() barrier.Versions {
	d.Helper()
	return barrier.ParseWanted(d.lease(svc.ProgrammedLease).Annotations[barrier.WantedAnnotation])
}

func (d *drains) reported(node string) barrier.Versions {
	d.Helper()
	v, _ := barrier.ParseReport(d.lease(barrier.OwnLease(node)).Annotations[barrier.ProgrammedAnnotation])
	return v
}

func (d *drains) lease(name string) *coordinationv1.Lease {
	d.Helper()
	l, err := d.client.CoordinationV1().Leases("kube-system").Get(d.Context(), name, metav1.GetOptions{})
	if err != nil {
		d.Fatal(err)
	}
	return l
}

// checkPolicy creates Pods of several kinds, and looks which of their containers get the hook.
func (d *drains) checkPolicy() {
	d.Helper()
	core := d.client.CoreV1()
	for name, level := range map[string]string{"kinds": "privileged", "restricted": "restricted"} {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pod-security.kubernetes.io/enforce": level}}}
		if _, err := core.Namespaces().Create(d.Context(), ns, metav1.CreateOptions{}); err != nil {
			d.Fatal(err)
		}
	}
	own := &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}}
	ports := []corev1.ContainerPort{{ContainerPort: 80}}
	for _, c := range []struct {
		name, namespace string
		change          func(*corev1.Pod)
		want            []bool // for each container
	}{
		{"ports", "kinds", nil, []bool{true}},
		{"confined", "restricted", func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{
				RunAsNonRoot: new(true), RunAsUser: new(int64(1000)),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			}
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
				AllowPrivilegeEscalation: new(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}
		}, []bool{true}},
		{"no-ports", "kinds", func(p *corev1.Pod) { p.Spec.Containers[0].Ports = nil }, []bool{false}},
		{"on", "kinds", func(p *corev1.Pod) {
			p.Annotations, p.Spec.Containers[0].Ports = map[string]string{svc.DrainAnnotation: svc.DrainOn}, nil
		}, []bool{true}},
		{"off", "kinds", func(p *corev1.Pod) { p.Annotations = map[string]string{svc.DrainAnnotation: svc.DrainOff} }, []bool{false}},
		{"host", "kinds", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, []bool{false}},
		{"windows", "kinds", func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }, []bool{false}},
		{"own-hook", "kinds", func(p *corev1.Pod) {
			p.Spec.Containers[0].Lifecycle = own
			start := &corev1.Lifecycle{PostStart: own.PreStop}
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "sidecar", Image: "sidecar"},
				corev1.Container{Name: "start", Image: "start", Lifecycle: start})
		}, []bool{false, true, true}},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: c.name + "-"}}
		pod.Spec.Containers = []corev1.Container{{Name: "web", Image: "web", Ports: ports}}
		if c.change != nil {
			c.change(pod)
		}
		var made *corev1.Pod
		testbed.Until(d.T, "the policy for "+c.name, func() (err error) { // it takes a moment until it is in force
			if made, err = core.Pods(c.namespace).Create(d.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
				return err
			}
			for i, want := range c.want {
				if got := asksProxy(&made.Spec.Containers[i]); got != want {
					return fmt.Errorf("container %s has the hook: %t, want %t", made.Spec.Containers[i].Name, got, want)
				}
			}
			return nil
		})
		if has := made.Spec.Containers; c.name == "own-hook" && (has[0].Lifecycle.PreStop.Sleep == nil || has[2].Lifecycle.PostStart == nil) {
			d.Errorf("hooks are lost: %+v", has)
		}
	}
}

// asksProxy reports whether a container has the hook of the policy.
func asksProxy(c *corev1.Container) bool {
	if c.Lifecycle == nil || c.Lifecycle.PreStop == nil || c.Lifecycle.PreStop.HTTPGet == nil {
		return false
	}
	get := c.Lifecycle.PreStop.HTTPGet
	return get.Host == "" && get.Path == "/drain" && get.Port == intstr.FromInt32(svc.DrainPort) && get.Scheme == corev1.URISchemeHTTP
}

// checkReach attacks: no other Pod and no other machine reaches a proxy at the port, a request of a Pod that stays changes
// nothing, and the account of a proxy writes the Lease of its node only.
func (d *drains) checkReach(s *server) {
	d.Helper()
	attacker := d.node.Pod("attacker")
	for _, way := range []struct {
		from *testbed.Host
		to   netip.Addr
	}{
		{attacker, s.host.Addr4()}, {attacker, d.node.Addr4()}, {attacker, s.host.Addr6()}, {d.node2, d.node.Addr4()}, {d.node2, s.host.Addr4()},
	} {
		ctx, cancel := context.WithTimeout(d.Context(), testbed.Patience)
		defer cancel()
		c, err := way.from.Dial(ctx, svc.TCP, netip.AddrPortFrom(way.to, svc.DrainPort))
		if !testbed.Refused(err) {
			d.Errorf("%s reaches the port at %s: %v", way.from.Name(), way.to, err)
		}
		if err == nil {
			_ = c.Close()
		}
	}
	testbed.Until(d.T, "an answer of the proxy", func() error {
		text, err := d.hook(s, s.Spec.Containers[0].Lifecycle.PreStop.HTTPGet)
		if err != nil || text != "restarted" {
			return fmt.Errorf("%q, %w", text, err)
		}
		return nil
	})
	client := d.asAccount("fairlead-proxy", "node1")
	patch := []byte(`{"metadata":{"annotations":{"fairlead.dev/programmed":"proxy-services=1"}}}`)
	for _, name := range []string{svc.ProgrammedLease, "fairlead-drain", barrier.OwnLease("node2")} {
		_, err := client.CoordinationV1().Leases("kube-system").Patch(d.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		if err == nil || !strings.Contains(err.Error(), "fairlead-drain-reports") {
			d.Errorf("the proxy of node1 may write the Lease %s: %v", name, err)
		}
	}
	client = d.asAccount("fairlead-drain", "node1")
	balanced := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "balanced"}}
	balanced.Spec.Type, balanced.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 80}}
	if _, err := d.client.CoreV1().Services("default").Create(d.Context(), balanced, metav1.CreateOptions{}); err != nil {
		d.Fatal(err)
	}
	api := client.CoreV1().RESTClient()
	for _, c := range []struct{ resource, name, patch string }{
		{"pods", s.Name, `{"status":{"podIP":"192.0.2.1"}}`},
		{"pods", s.Name, `{"status":{"phase":"Failed"}}`},
		{"pods", s.Name, `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`},
		{"pods", s.Name, `{"status":{"conditions":[{"type":"Ready","$patch":"delete"}]}}`},
		{"pods", s.Name, `{"metadata":{"labels":{"app":"other"}}}`},
		{"pods", s.Name, `{"metadata":{"annotations":{"fairlead.dev/drain":"off"}}}`},
		{"services", "balanced", `{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.1"}]}}}`},
		{"services", "web", `{"metadata":{"annotations":{"fairlead.dev/forwarding":"direct"}}}`},
		{"services", "web", `{"status":{"conditions":[{"type":"A","status":"True","reason":"A","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`},
	} {
		err := api.Patch(types.StrategicMergePatchType).Namespace("default").Resource(c.resource).Name(c.name).SubResource("status").
			Body([]byte(c.patch)).Do(d.Context()).Error()
		if err == nil || !strings.Contains(err.Error(), "fairlead-drain-status") {
			d.Errorf("the controller may write %s of %s: %v", c.patch, c.resource, err)
		}
	}
}

// asAccount returns a client with the rights of a service account on a node.
func (d *drains) asAccount(account, node string) kubernetes.Interface {
	d.Helper()
	config := rest.AnonymousClientConfig(d.api.Config)
	config.BearerToken = d.token(account, node, "")
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		d.Fatal(err)
	}
	return client
}

// checkGone ends the proxy: a Pod's end is as without it, at once.
func (d *drains) checkGone(s *server) {
	d.Helper()
	d.proxies["node1"].Stop()
	text, err := d.hook(s, s.Spec.Containers[0].Lifecycle.PreStop.HTTPGet)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		d.Errorf("without a proxy: %q, %v, want refused", text, err)
	}
	testbed.Receive(d.T, "the end of a Pod without a proxy", d.remove(s))
}
