package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
)

const (
	rollingName  = "rolls"
	rollingPods  = 3
	rollingPool  = "192.168.88.251-192.168.88.254" // of the switch's network, above all hosts
	rollingEvery = 12 * time.Millisecond           // six ways, 500 connections a second
	// rollingAnswer is how long an answer may take. What has not come by then is lost: a packet
	// that meets a Pod that has gone is repeated after a second, and lost again.
	rollingAnswer = 10 * time.Second
)

// rollingRig is a server, two nodes with agents, one with a kube-proxy in the place of an
// agent if there is one, and a client outside.
type rollingRig struct {
	*api
	nodes   []*host
	peer    *host // nil without kube-proxy
	outside *host
	running []*process
}

// startRolling makes a rollingRig, with a kube-proxy if that is wanted and there is one.
func (b *bench) startRolling(ctx context.Context, peer bool) (r *rollingRig, err error) {
	r = &rollingRig{}
	if r.api, err = b.startAPIWith(ctx, "--lb-pool", rollingPool); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.end(ctx))
		}
	}()
	if r.outside, err = b.net.host(ctx, fmt.Sprintf("outside%d", b.net.count)); err != nil {
		return r, err
	}
	for range 2 {
		h, err := b.net.host(ctx, fmt.Sprintf("node%d", b.net.count))
		if err != nil {
			return r, err
		}
		r.nodes = append(r.nodes, h)
		dir, err := os.MkdirTemp(b.dir, "agent-")
		if err != nil {
			return r, err
		}
		agent, err := spawn(h, dir, "agent", b.fairlead, "agent", "--server", "https://"+switchAddr+":6443", "--token-file", r.token,
			"--node-name", h.name, "--node-ip", h.addr.String(), "--data-dir", dir)
		if err != nil {
			return r, err
		}
		r.running = append(r.running, agent)
	}
	var ranges []string // of Pods
	for i, h := range r.nodes {
		if err := waitFor(ctx, time.Minute, 50*time.Millisecond, r.running[i], func() error {
			node, err := r.client.CoreV1().Nodes().Get(ctx, h.name, metav1.GetOptions{})
			if err == nil && !nodeReady(node) {
				err = fmt.Errorf("node %s is not ready: %+v", h.name, node.Status.Conditions)
			}
			if err == nil {
				ranges = append(ranges, node.Spec.PodCIDR)
			}
			return err
		}); err != nil {
			return r, err
		}
	}
	if peer && b.peer("kube-proxy") != "" {
		err = r.startPeer(ctx, b, ranges)
	}
	return r, err
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// startPeer makes a node that has kube-proxy and no agent, and reaches the Pods of the others.
func (r *rollingRig) startPeer(ctx context.Context, b *bench, ranges []string) (err error) {
	if r.peer, err = b.net.host(ctx, fmt.Sprintf("peer%d", b.net.count)); err != nil {
		return err
	}
	if err := errors.Join(r.peer.sysctl("net/ipv4/ip_forward", "1"), makeNode(ctx, r.client, r.peer)); err != nil {
		return err
	}
	cordon := []byte(`{"spec":{"unschedulable":true}}`)
	if _, err := r.client.CoreV1().Nodes().Patch(ctx, r.peer.name, types.MergePatchType, cordon, metav1.PatchOptions{}); err != nil {
		return err
	}
	for i, h := range r.nodes {
		if err := ip(ctx, fmt.Sprintf("-n %s route add %s via %s", r.peer.name, ranges[i], h.addr)); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(b.dir, "kube-proxy-")
	if err != nil {
		return err
	}
	proc, err := b.kubeProxy().start(r.peer, dir, r.kubeconfig)
	if err == nil {
		r.running = append(r.running, proc)
	}
	return err
}

func (r *rollingRig) end(ctx context.Context) error {
	var errs []error
	for _, p := range append(r.running, r.process) {
		errs = append(errs, p.stop())
	}
	for _, h := range append(r.nodes, r.peer, r.outside) {
		if h != nil {
			errs = append(errs, h.remove(context.WithoutCancel(ctx)))
		}
	}
	return errors.Join(errs...)
}

// deploy makes the Service and a Deployment whose program ends at once at SIGTERM, without a
// preStop hook, and returns the Service when it has an address outside. command is of this program, and it listens at target.
func (r *rollingRig) deploy(ctx context.Context, b *bench, target int, command ...string) (*corev1.Service, error) {
	// The program may lie where Pods that are held to baseline have their own directory.
	privileged := []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"privileged"}}}`)
	_, err := r.client.CoreV1().Namespaces().Patch(ctx, benchNamespace, types.MergePatchType, privileged, metav1.PatchOptions{})
	if err != nil {
		return nil, err
	}
	app := map[string]string{"app": rollingName}
	_, err = r.client.AppsV1().Deployments(benchNamespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: rollingName},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(rollingPods)), Selector: &metav1.LabelSelector{MatchLabels: app},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: app}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "main", Image: "host", Command: append([]string{b.self}, command...),
				ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
					TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt(target)},
				}},
			}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	port := func(name string, p corev1.Protocol) corev1.ServicePort {
		return corev1.ServicePort{Name: name, Protocol: p, Port: servicePort, TargetPort: intstr.FromInt(target)}
	}
	s, err := r.client.CoreV1().Services(benchNamespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: rollingName},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: app,
			Ports: []corev1.ServicePort{port("tcp", corev1.ProtocolTCP), port("udp", corev1.ProtocolUDP)},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return s, waitFor(ctx, time.Minute, 20*time.Millisecond, r.process, func() error {
		s, err = r.client.CoreV1().Services(benchNamespace).Get(ctx, rollingName, metav1.GetOptions{})
		if err == nil && len(s.Status.LoadBalancer.Ingress) == 0 {
			err = errors.New("no address outside")
		}
		return err
	})
}

// way is one by which connections reach the Service at a steady rate.
type way struct {
	kind       string // of the table
	peer       bool   // through kube-proxy
	from       *host
	network    string
	to         netip.AddrPort
	made, lost atomic.Int64
}

func (r *rollingRig) ways(s *corev1.Service) ([]*way, error) {
	inside, err1 := netip.ParseAddr(s.Spec.ClusterIP)
	outside, err2 := netip.ParseAddr(s.Status.LoadBalancer.Ingress[0].IP)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	var all []*way
	for i, network := range []string{"tcp", "udp"} {
		for _, h := range r.nodes {
			all = append(all, &way{kind: network + " inside", from: h, network: network, to: netip.AddrPortFrom(inside, servicePort)})
		}
		all = append(all, &way{kind: network + " outside", from: r.outside, network: network, to: netip.AddrPortFrom(outside, servicePort)})
		if r.peer != nil {
			node := netip.AddrPortFrom(r.peer.addr, uint16(s.Spec.Ports[i].NodePort))
			all = append(all,
				&way{kind: network + " inside", peer: true, from: r.peer, network: network, to: netip.AddrPortFrom(inside, servicePort)},
				&way{kind: network + " outside", peer: true, from: r.outside, network: network, to: node})
		}
	}
	return all, nil
}

// request makes its own connection for one answer.
func (w *way) request(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, rollingAnswer)
	defer cancel()
	c, err := w.from.dial(ctx, w.network, w.to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(rollingAnswer)); err != nil {
		return err
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // its port is free again at once
	} else if _, err := c.Write([]byte("?")); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 64))
	return err
}

// open opens connections until ctx ends, and waits for their answers.
func (w *way) open(ctx context.Context, every time.Duration) {
	var requests sync.WaitGroup
	defer requests.Wait()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		requests.Go(func() {
			w.made.Add(1)
			if w.request(context.WithoutCancel(ctx)) != nil {
				w.lost.Add(1)
			}
		})
	}
}

// roll replaces all Pods of the Deployment, and returns the removals of the Pods that went
// which came to their end; those are missing that were ended before.
func (r *rollingRig) roll(ctx context.Context, revision int) ([]*removal, error) {
	ctx, cancel := context.WithTimeout(ctx, 50*time.Second) // less than the client gives a watch
	defer cancel()
	w, err := r.client.CoreV1().Pods(benchNamespace).Watch(ctx, metav1.ListOptions{LabelSelector: "app=" + rollingName})
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	removals, err := r.followRemovals(ctx)
	if err != nil {
		return nil, err
	}
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"revision":"%d"}}}}}`, revision)
	_, err = r.client.AppsV1().Deployments(benchNamespace).Patch(ctx, rollingName, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return nil, err
	}
	for gone := 0; gone < rollingPods; {
		e, ok := <-w.ResultChan()
		if !ok {
			return nil, fmt.Errorf("%d of %d Pods were replaced within 50 s", gone, rollingPods)
		}
		p, ok := e.Object.(*corev1.Pod)
		if !ok || p.DeletionTimestamp == nil {
			continue
		}
		removals.see(e)
		if e.Type == watch.Deleted {
			gone++
		}
	}
	return removals.drained(), nil
}

// runRolling replaces the Pods of a Deployment again and again, while connections are opened
// from nodes and from outside.
func (b *bench) runRolling(ctx context.Context) (figures []figure, err error) {
	r, err := b.startRolling(ctx, true)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.end(ctx)) }()
	s, err := r.deploy(ctx, b, backendPort, backendCommand)
	if err != nil {
		return nil, err
	}
	ways, err := r.ways(s)
	if err != nil {
		return nil, err
	}
	for _, w := range ways {
		if err := waitFor(ctx, time.Minute, 20*time.Millisecond, r.process, func() error { return w.request(ctx) }); err != nil {
			return nil, fmt.Errorf("%s from %s: %w", w.kind, w.from.name, err)
		}
	}
	every := rollingEvery
	if b.small {
		every *= 5
	}
	under, end := context.WithCancel(ctx)
	defer end()
	var load sync.WaitGroup
	for _, w := range ways {
		load.Go(func() { w.open(under, every) })
	}
	var drained []*removal
	rolls := b.few(8, 1)
	for i := range rolls {
		d, err := r.roll(ctx, i)
		if err != nil {
			return nil, err
		}
		drained = append(drained, d...)
	}
	end()
	load.Wait()
	for _, kind := range []string{"tcp inside", "tcp outside", "udp inside", "udp outside"} {
		figures = append(figures, lostBy(ways, kind, rolls*rollingPods))
	}
	early := float64(rolls*rollingPods - len(drained))
	figures = append(figures, unpaired("Pods ended before all nodes had reported", pieces, early, expectation{below: 1}))
	return append(figures, removalFigures(drained)...), nil
}

// lostBy is how many connections of a kind were lost.
func lostBy(ways []*way, kind string, replaced int) figure {
	made, lost, peerMade, peerLost := int64(0), int64(0), int64(0), int64(0)
	for _, w := range ways {
		switch {
		case w.kind != kind:
		case w.peer:
			peerMade, peerLost = peerMade+w.made.Load(), peerLost+w.lost.Load()
		default:
			made, lost = made+w.made.Load(), lost+w.lost.Load()
		}
	}
	what := fmt.Sprintf("connections lost, %s, of %d with %d Pods replaced", kind, made, replaced)
	below := 1.0
	if strings.HasPrefix(kind, "udp") { // a port that was used a moment ago leads to the Pod that has just ended
		below = max(below, float64(made)/1000)
	}
	f := unpaired(what, pieces, float64(lost), expectation{below: below})
	if peerMade > 0 {
		f.what += fmt.Sprintf(" (%d through kube-proxy)", peerMade)
		f.peer, f.peerName = float64(peerLost), "kube-proxy"
	}
	return f
}
