package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

const (
	podNode                   = "podnode" // the node all Pods say they are on; nobody runs it
	podsOfService             = 10
	manyServices, fewServices = 1000, 20
	controllerWait            = 5 * time.Minute
	flipLimit                 = 30 * time.Second
	flipPause                 = 50 * time.Millisecond
)

// manager is a program that keeps EndpointSlices, Endpoints and mirrored
// slices.
type manager struct {
	name  string
	start func(dir, kubeconfig string) (*process, error)
}

func (b *bench) fairleadControllers() manager {
	return manager{"fairlead", func(dir, kubeconfig string) (*process, error) {
		return spawn(nil, dir, "fairlead-controllers", b.fairlead, "controllers", "--kubeconfig", kubeconfig,
			"--controllers", "endpoints,endpointslice,endpointslicemirroring", "--leader-elect=false")
	}}
}

// kubeControllerManager runs the same three controllers of Kubernetes, with its
// default limits on requests lifted: with them it would measure the limits.
func (b *bench) kubeControllerManager() manager {
	return manager{"kube-controller-manager", func(dir, kubeconfig string) (*process, error) {
		return spawn(nil, dir, "kube-controller-manager", b.peer("kube-controller-manager"), "--kubeconfig", kubeconfig,
			"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller",
			"--leader-elect=false", "--kube-api-qps", "5000", "--kube-api-burst", "5000", "--kube-api-content-type", "application/vnd.kubernetes.protobuf")
	}}
}

// managerResult is what was measured of one manager.
type managerResult struct {
	cold, coldCPU float64   // seconds
	flips         []float64 // milliseconds
	flipCPU       float64   // milliseconds
	memory        float64   // megabytes
}

// runControllers gives each manager an API server with the same Services and
// Pods, and no EndpointSlices yet.
func (b *bench) runControllers(ctx context.Context) ([]figure, error) {
	mine, err := b.measureManager(ctx, b.fairleadControllers())
	if err != nil {
		return nil, err
	}
	var peer managerResult
	there := b.peer("kube-controller-manager") != ""
	if there {
		if peer, err = b.measureManager(ctx, b.kubeControllerManager()); err != nil {
			return nil, err
		}
	}
	against := func(what string, u unit, mine, peer float64, want expectation) figure {
		f := alone(what, u, mine, want)
		if there {
			f.peer, f.peerName = peer, "kube-controller-manager"
		}
		return f
	}
	size := fmt.Sprintf("%d services x %d pods", b.few(manyServices, fewServices), podsOfService)
	return []figure{
		against(fmt.Sprintf("pod status to slice at %s, p50 of %d", size, len(mine.flips)), milliseconds, percentile(mine.flips, 0.50), percentile(peer.flips, 0.50), expectation{share: 0.5}),
		against(fmt.Sprintf("pod status to slice at %s, p99 of %d", size, len(mine.flips)), milliseconds, percentile(mine.flips, 0.99), percentile(peer.flips, 0.99), expectation{share: 0.5}),
		against("CPU for one change of a pod", milliseconds, mine.flipCPU, peer.flipCPU, expectation{share: 1. / 3}),
		against("all slices, from a cold start", seconds, mine.cold, peer.cold, expectation{}),
		against("CPU for it", seconds, mine.coldCPU, peer.coldCPU, expectation{share: 1. / 3}),
		against("memory of the controllers", megabytes, mine.memory, peer.memory, expectation{}),
	}, nil
}

func (b *bench) measureManager(ctx context.Context, m manager) (r managerResult, err error) {
	a, err := b.startAPI(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	n := b.few(manyServices, fewServices)
	if err := fillPods(ctx, a.client, n); err != nil {
		return r, err
	}
	dir, err := os.MkdirTemp(b.dir, m.name+"-")
	if err != nil {
		return r, err
	}
	p, err := m.start(dir, a.kubeconfig)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	if err := r.measureCold(ctx, a, p, n); err != nil {
		return r, errors.Join(fmt.Errorf("%s: %w", m.name, err), p.alive())
	}
	if err := r.measureFlips(ctx, a, p, n, b.few(100, 5)); err != nil {
		return r, errors.Join(fmt.Errorf("%s: %w", m.name, err), p.alive())
	}
	memory, err := p.memory()
	r.memory = memory / 1e6
	b.say("%s: all slices after %.2f s; pod to slice p50 %.1f ms", m.name, r.cold, percentile(r.flips, 0.5))
	return r, err
}

// fillPods creates n Services with selectors, and ready Pods for each.
func fillPods(ctx context.Context, client kubernetes.Interface, n int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: podNode}}
	if _, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	for i := range n {
		g.Go(func() error {
			app := map[string]string{"app": fmt.Sprintf("app-%d", i)}
			s := &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: app["app"], Namespace: benchNamespace},
				Spec: corev1.ServiceSpec{Selector: app, Ports: []corev1.ServicePort{{
					Name: "http", Port: servicePort, TargetPort: intstr.FromInt32(backendPort),
				}}},
			}
			_, err := client.CoreV1().Services(benchNamespace).Create(ctx, s, metav1.CreateOptions{})
			return err
		})
		for j := range podsOfService {
			g.Go(func() error { return makePod(ctx, client, i, j) })
		}
	}
	return g.Wait()
}

func makePod(ctx context.Context, client kubernetes.Interface, i, j int) error {
	pod, err := client.CoreV1().Pods(benchNamespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: podName(i, j), Namespace: benchNamespace, Labels: map[string]string{"app": fmt.Sprintf("app-%d", i)}},
		Spec:       corev1.PodSpec{NodeName: podNode, Containers: []corev1.Container{{Name: "main", Image: "host"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create pod: %w", err)
	}
	ip := endpointAddr(uint32(i*podsOfService + j)).String()
	pod.Status.Phase = corev1.PodRunning
	pod.Status.PodIP, pod.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
	pod.Status.Conditions = readiness(true)
	_, err = client.CoreV1().Pods(benchNamespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

func podName(i, j int) string { return fmt.Sprintf("app-%d-%d", i, j) }

func readiness(ready bool) []corev1.PodCondition {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
}

// measureCold waits until every Pod is in a slice.
func (r *managerResult) measureCold(ctx context.Context, a *api, p *process, n int) error {
	ctx, cancel := context.WithTimeout(ctx, controllerWait)
	defer cancel()
	slices, err := a.client.DiscoveryV1().EndpointSlices(benchNamespace).Watch(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	defer slices.Stop()
	endpoints := map[string]int{}
	total := 0
	for total < n*podsOfService {
		select {
		case e, open := <-slices.ResultChan():
			s, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !open || !ok {
				return fmt.Errorf("the watch ended with %d of %d endpoints: %v", total, n*podsOfService, e.Object)
			}
			total += len(s.Endpoints) - endpoints[s.Name]
			endpoints[s.Name] = len(s.Endpoints)
		case <-ctx.Done():
			return fmt.Errorf("%d of %d endpoints after %s", total, n*podsOfService, controllerWait)
		}
	}
	r.cold = time.Since(p.begin).Seconds()
	cpu, err := p.cpu()
	r.coldCPU = cpu.Seconds()
	return err
}

// measureFlips changes the readiness of Pods, one at a time, and takes the time
// between the two moments at which one observer of the API sees the Pod and the
// slice change.
func (r *managerResult) measureFlips(ctx context.Context, a *api, p *process, n, flips int) error {
	before, err := p.cpu()
	if err != nil {
		return err
	}
	for i := range flips {
		time.Sleep(flipPause)
		d, err := flip(ctx, a.client, i*7%n, i%podsOfService)
		if err != nil {
			return fmt.Errorf("change %d: %w", i, err)
		}
		r.flips = append(r.flips, milliseconds.in(d))
	}
	after, err := p.cpu()
	r.flipCPU = milliseconds.in(after-before) / float64(flips)
	return err
}

// flip makes a ready Pod unready.
func flip(ctx context.Context, client kubernetes.Interface, i, j int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, flipLimit)
	defer cancel()
	pod, err := client.CoreV1().Pods(benchNamespace).Get(ctx, podName(i, j), metav1.GetOptions{})
	if err != nil {
		return 0, err
	}
	seen := metav1.ListOptions{ResourceVersion: pod.ResourceVersion}
	seen.LabelSelector = fmt.Sprintf("app=app-%d", i)
	pods, err := client.CoreV1().Pods(benchNamespace).Watch(ctx, seen)
	if err != nil {
		return 0, err
	}
	defer pods.Stop()
	list, err := client.DiscoveryV1().EndpointSlices(benchNamespace).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return 0, err
	}
	written, err := client.DiscoveryV1().EndpointSlices(benchNamespace).Watch(ctx, metav1.ListOptions{
		ResourceVersion: list.ResourceVersion, LabelSelector: fmt.Sprintf("%s=app-%d", discoveryv1.LabelServiceName, i),
	})
	if err != nil {
		return 0, err
	}
	defer written.Stop()
	pod.Status.Conditions = readiness(false)
	if _, err := client.CoreV1().Pods(benchNamespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		return 0, err
	}
	return between(ctx, pod.Name, pods, written)
}

// between waits for both changes and returns the time from the one of the Pod
// to the one of the slice.
func between(ctx context.Context, pod string, pods, written watch.Interface) (time.Duration, error) {
	var podAt, sliceAt time.Time
	for podAt.IsZero() || sliceAt.IsZero() {
		select {
		case e := <-pods.ResultChan():
			if p, ok := e.Object.(*corev1.Pod); ok && p.Name == pod && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse
			}) {
				podAt = time.Now()
			}
		case e := <-written.ResultChan():
			if s, ok := e.Object.(*discoveryv1.EndpointSlice); ok && slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
				return e.TargetRef != nil && e.TargetRef.Name == pod && e.Conditions.Ready != nil && !*e.Conditions.Ready
			}) {
				sliceAt = time.Now()
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("pod %s: the change was not seen: %w", pod, ctx.Err())
		}
	}
	return max(sliceAt.Sub(podAt), 0), nil
}
