package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
)

// The network of load balancers: nodes and the client have a second address on it, and
// the pool is a part of it, of 16,382 addresses.
const (
	lbNetwork = "10.64.0.0/16"
	lbHosts   = "10.64.255."
	lbPool    = "10.64.0.1-10.64.63.254"
	lbMetrics = 7472
	lbPeers   = 3 // nodes where more than one speaker is wanted
)

// balancers are 'fairlead lb' and a proxy on some hosts, and a client outside.
type balancers struct {
	bench      *bench
	dir        string
	kubeconfig string
	client     kubernetes.Interface
	hosts      []*host
	lbs        []*process
	proxies    []*process
	controller *process // nil if those of the hosts are it
	outside    *host
}

// startBalancers starts n hosts with a proxy and a speaker each. With a controller of its
// own, the hosts have speakers alone.
func (b *bench) startBalancers(
	ctx context.Context, n int, p proxy, kubeconfig string, client kubernetes.Interface, own bool,
) (s *balancers, err error) {
	s = &balancers{bench: b, kubeconfig: kubeconfig, client: client}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop(ctx))
		}
	}()
	if s.dir, err = os.MkdirTemp(b.dir, "lb-"); err != nil {
		return s, err
	}
	if s.outside, err = s.attach(ctx, "outside"); err != nil {
		return s, err
	}
	if own {
		s.controller, err = spawn(nil, s.dir, "lb-controller", b.fairlead, "lb", "--kubeconfig", kubeconfig, "--node-name", "controller",
			"--speaker=false", "--lb-pool", lbPool, "--metrics-bind-address", "")
		if err != nil {
			return s, err
		}
	}
	for i := range n {
		h, err := s.attach(ctx, fmt.Sprintf("balancer%d", i))
		if err != nil {
			return s, err
		}
		s.hosts = append(s.hosts, h)
		if err := errors.Join(h.sysctl("net/ipv4/ip_forward", "1"), makeNode(ctx, client, h)); err != nil {
			return s, err
		}
		dir, err := os.MkdirTemp(s.dir, h.name+"-")
		if err != nil {
			return s, err
		}
		proc, err := p.start(h, dir, kubeconfig)
		if err != nil {
			return s, err
		}
		s.proxies = append(s.proxies, proc)
		args := []string{"lb", "--kubeconfig", kubeconfig, "--node-name", h.name, "--node-ip", h.addr.String(),
			"--metrics-bind-address", fmt.Sprintf("127.0.0.1:%d", lbMetrics)}
		if own {
			args = append(args, "--controller=false")
		} else {
			args = append(args, "--lb-pool", lbPool)
		}
		speaker, err := spawn(h, dir, "lb", b.fairlead, args...)
		if err != nil {
			return s, err
		}
		s.lbs = append(s.lbs, speaker)
	}
	return s, nil
}

// attach makes a host that is on the network of load balancers as well.
func (s *balancers) attach(ctx context.Context, name string) (*host, error) {
	h, err := s.bench.net.host(ctx, fmt.Sprintf("%s%d", name, s.bench.net.count))
	if err != nil {
		return nil, err
	}
	return h, ip(ctx, fmt.Sprintf("-n %s addr add %s%d/16 dev eth0", h.name, lbHosts, h.addr.As4()[3]))
}

func (s *balancers) stop(ctx context.Context) error {
	var errs []error
	for _, p := range append(append(s.lbs, s.proxies...), s.controller) {
		if p != nil {
			errs = append(errs, p.stop())
		}
	}
	for _, h := range append(s.hosts, s.outside) {
		if h != nil {
			errs = append(errs, h.remove(context.WithoutCancel(ctx)))
		}
	}
	return errors.Join(errs...)
}

// create makes a Service of type LoadBalancer with one endpoint, and returns when the API has
// published its address.
func (s *balancers) create(ctx context.Context, name string, endpoint uint32) (vip netip.AddrPort, err error) {
	api := s.client.DiscoveryV1().EndpointSlices(benchNamespace)
	_, err = api.Create(ctx, endpointSlice(name, 0, []netip.Addr{endpointAddr(endpoint)}), metav1.CreateOptions{})
	if err != nil {
		return vip, err
	}
	if err := s.bare(ctx, name); err != nil {
		return vip, err
	}
	return s.address(ctx, name)
}

// address waits for the address of a Service.
func (s *balancers) address(ctx context.Context, name string) (vip netip.AddrPort, err error) {
	p := s.controller
	if p == nil {
		p = s.lbs[0]
	}
	err = waitFor(ctx, time.Minute, time.Millisecond, p, func() error {
		got, err := s.client.CoreV1().Services(benchNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(got.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("service %s has no address", name)
		}
		a, err := netip.ParseAddr(got.Status.LoadBalancer.Ingress[0].IP)
		vip = netip.AddrPortFrom(a, servicePort)
		return err
	})
	return vip, err
}

// answered waits until the client outside gets an answer from an address.
func (s *balancers) answered(ctx context.Context, vip netip.AddrPort) (at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = s.outside.on(func() (err error) {
		at, err = until(ctx, vip, time.Millisecond, func(netip.Addr) bool { return true })
		return err
	})
	return at, err
}

// served creates Services one after the other, and returns in milliseconds how long after
// the begin of each the client outside had its first answer.
func (s *balancers) served(ctx context.Context, n int) (took []float64, last netip.AddrPort, err error) {
	for i := range n {
		begin := time.Now()
		if last, err = s.create(ctx, fmt.Sprintf("served-%d", i), uint32(i)); err != nil {
			return took, last, err
		}
		at, err := s.answered(ctx, last)
		if err != nil {
			return took, last, err
		}
		took = append(took, milliseconds.in(at.Sub(begin)))
	}
	return took, last, nil
}

// owner returns the host that the client outside knows for an address, nil if none.
func (s *balancers) owner(ctx context.Context, a netip.Addr) (int, error) {
	for i, h := range s.hosts {
		var mac string
		err := h.on(func() error {
			link, err := net.InterfaceByName("eth0")
			if err == nil {
				mac = link.HardwareAddr.String()
			}
			return err
		})
		if err != nil {
			return 0, err
		}
		out, err := exec.CommandContext(ctx, "ip", "-n", s.outside.name, "neigh", "show", "to", a.String()).Output()
		if err != nil {
			return 0, err
		}
		if strings.Contains(string(out), mac) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no node is known to have %s", a)
}

// runLB runs 'fairlead lb' in the place of MetalLB: on kube-apiserver and beside kube-proxy, with
// the rights of the document. When the kube-proxy of a node ends, its addresses move.
func (b *bench) runLB(ctx context.Context) (figures []figure, err error) {
	dir, err := os.MkdirTemp(b.dir, "lb-api-")
	if err != nil {
		return nil, err
	}
	k, err := startKubernetes(ctx, dir, b.peers, "--bind-address", "0.0.0.0", "--advertise-address", switchAddr)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, k.stop()) }()
	if err := errors.Join(makeNamespace(ctx, k.client), b.documentedRights(ctx, k.client)); err != nil {
		return nil, err
	}
	admin, own := filepath.Join(dir, "admin"), filepath.Join(dir, "lb")
	err = errors.Join(reachable(k.kubeconfig, admin, ""), reachable(k.kubeconfig, own, "system:serviceaccount:kube-system:fairlead-lb"))
	if err != nil {
		return nil, err
	}
	p := b.kubeProxy()
	s, err := b.startBalancers(ctx, 2, proxy{p.name, func(h *host, dir, _ string) (*process, error) {
		return p.start(h, dir, admin)
	}}, own, k.client, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop(ctx)) }()
	n := b.few(10, 2)
	took, vip, err := s.served(ctx, n)
	if err != nil {
		return nil, err
	}
	moved, err := s.move(ctx, vip)
	if err != nil {
		return nil, err
	}
	return []figure{
		alone(fmt.Sprintf("Services on kube-apiserver with an address that answers outside, of %d", n), pieces,
			float64(len(took)), expectation{}),
		alone(fmt.Sprintf("create to first answer through kube-proxy, p50 of %d", n), milliseconds, percentile(took, 0.5), expectation{}),
		alone("kube-proxy of the node ends to another node answers", seconds, moved.Seconds(), expectation{below: 5}),
	}, nil
}

// move ends the proxy of the node that has an address, and returns after how long another one
// has it and answers.
func (s *balancers) move(ctx context.Context, vip netip.AddrPort) (time.Duration, error) {
	var was int
	if err := waitFor(ctx, time.Minute, 10*time.Millisecond, s.lbs[0], func() (err error) {
		was, err = s.owner(ctx, vip.Addr())
		return err
	}); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := s.proxies[was].stop(); err != nil {
		return 0, err
	}
	err := waitFor(ctx, time.Minute, 10*time.Millisecond, s.lbs[was], func() error {
		now, err := s.owner(ctx, vip.Addr())
		if err == nil && now == was {
			err = fmt.Errorf("%s still has %s", s.hosts[was].name, vip.Addr())
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	at, err := s.answered(ctx, vip)
	return at.Sub(begin), err
}

// reachable writes a kubeconfig that works on every host, for a user if that is not empty.
func reachable(from, to, user string) error {
	cfg, err := clientcmd.LoadFromFile(from)
	if err != nil {
		return err
	}
	for _, c := range cfg.Clusters {
		c.Server = strings.Replace(c.Server, "127.0.0.1", switchAddr, 1)
	}
	for _, a := range cfg.AuthInfos {
		a.Impersonate = user
	}
	return clientcmd.WriteToFile(*cfg, to)
}

var lbRights = regexp.MustCompile("(?s)```yaml\n(apiVersion: rbac.authorization.k8s.io/v1\n.*?)```")

// documentedRights makes the objects that docs/loadbalancer.md has for another Kubernetes.
func (b *bench) documentedRights(ctx context.Context, client kubernetes.Interface) error {
	text, err := os.ReadFile(filepath.Join(b.sources, "docs", "loadbalancer.md"))
	if err != nil {
		return err
	}
	block := lbRights.FindSubmatch(text)
	if block == nil {
		return errors.New("docs/loadbalancer.md has no rights")
	}
	api, options := client.RbacV1(), metav1.CreateOptions{}
	for part := range bytes.SplitSeq(block[1], []byte("---\n")) {
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(part, nil, nil)
		if err != nil {
			return err
		}
		switch o := o.(type) {
		case *rbacv1.ClusterRole:
			_, err = api.ClusterRoles().Create(ctx, o, options)
		case *rbacv1.ClusterRoleBinding:
			_, err = api.ClusterRoleBindings().Create(ctx, o, options)
		case *rbacv1.Role:
			_, err = api.Roles(o.Namespace).Create(ctx, o, options)
		case *rbacv1.RoleBinding:
			_, err = api.RoleBindings(o.Namespace).Create(ctx, o, options)
		default:
			err = fmt.Errorf("docs/loadbalancer.md: a right of type %T", o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inBalancers makes an API server with nodes that have fairlead's proxy for f.
func (b *bench) inBalancers(ctx context.Context, nodes int, f func(*balancers) error) error {
	a, err := b.startAPI(ctx)
	if err != nil {
		return err
	}
	s, err := b.startBalancers(ctx, nodes, b.fairleadProxy(), a.kubeconfig, a.client, true)
	if err != nil {
		return errors.Join(err, a.stop())
	}
	return errors.Join(f(s), s.stop(ctx), a.stop())
}

// runLBCreate measures from the creation of a Service to the first answer of its address.
func (b *bench) runLBCreate(ctx context.Context) (figures []figure, err error) {
	n := b.few(200, 3)
	err = b.inBalancers(ctx, lbPeers, func(s *balancers) error {
		warm, err := s.create(ctx, "warm", 0)
		if err == nil {
			_, err = s.answered(ctx, warm) // everything has begun
		}
		if err != nil {
			return err
		}
		took, _, err := s.served(ctx, n)
		if err != nil {
			return err
		}
		figures = []figure{
			alone(fmt.Sprintf("create to first answer outside, %d nodes, p50 of %d", lbPeers, n),
				milliseconds, percentile(took, 0.5), expectation{}),
			alone(fmt.Sprintf("create to first answer outside, %d nodes, p99 of %d", lbPeers, n), milliseconds, percentile(took, 0.99),
				expectation{below: 300}),
		}
		return nil
	})
	return figures, err
}

// runLB10k gives addresses to 10,000 Services and looks at what the programs cost then.
func (b *bench) runLB10k(ctx context.Context) (figures []figure, err error) {
	n := b.few(10_000, 100)
	err = b.inBalancers(ctx, lbPeers, func(s *balancers) error {
		first, err := s.create(ctx, "first", 0)
		if err == nil {
			_, err = s.answered(ctx, first)
		}
		if err != nil {
			return err
		}
		cpu, err := s.controller.cpu()
		if err != nil {
			return err
		}
		took, err := s.many(ctx, n)
		if err != nil {
			return err
		}
		after, err := s.controller.cpu()
		if err != nil {
			return err
		}
		cost, err := s.cost(ctx, n+1)
		figures = append([]figure{
			alone(fmt.Sprintf("%d Services created to the last one has its address", n), seconds, took.Seconds(), expectation{}),
			alone("CPU of the controller for one", milliseconds, milliseconds.in(after-cpu)/float64(n), expectation{}),
		}, cost...)
		return err
	})
	return figures, err
}

// bare creates a Service of type LoadBalancer without endpoints.
func (s *balancers) bare(ctx context.Context, name string) error {
	_, err := s.client.CoreV1().Services(benchNamespace).Create(ctx, loadBalancer(name), metav1.CreateOptions{})
	return err
}

// loadBalancer is a Service without node ports.
func loadBalancer(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: new(false),
		Ports: []corev1.ServicePort{{Name: "http", Port: servicePort, TargetPort: intstr.FromInt32(backendPort)}},
	}}
}

// many creates n Services at once and waits until all have an address.
func (s *balancers) many(ctx context.Context, n int) (time.Duration, error) {
	begin := time.Now()
	g, limited := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range n {
		g.Go(func() error {
			return s.bare(limited, "many-"+strconv.Itoa(i))
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	s.bench.say("%d Services created in %s", n, time.Since(begin).Round(time.Millisecond))
	err := s.published(ctx, n)
	return time.Since(begin), err
}

// published waits until n Services have an address each.
func (s *balancers) published(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 3*s.bench.limit())
	defer cancel()
	owners := map[string]string{}             // by address
	for ctx.Err() == nil && len(owners) < n { // a watch ends when the client's time for a request does
		w, err := s.client.CoreV1().Services(benchNamespace).Watch(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for event := range w.ResultChan() {
			service, ok := event.Object.(*corev1.Service)
			if !ok {
				break
			}
			for _, in := range service.Status.LoadBalancer.Ingress {
				if of := owners[in.IP]; of != "" && of != service.Name {
					w.Stop()
					return fmt.Errorf("%s is given to %s and %s", in.IP, of, service.Name)
				}
				owners[in.IP] = service.Name
			}
			if len(owners) >= n {
				break
			}
		}
		w.Stop()
	}
	if len(owners) < n {
		return fmt.Errorf("%d of %d Services have an address", len(owners), n)
	}
	return nil
}

// cost waits until the speakers announce n addresses together and are quiet, and returns what the
// controller and one speaker cost then.
func (s *balancers) cost(ctx context.Context, n int) ([]figure, error) {
	err := waitFor(ctx, s.bench.limit(), 200*time.Millisecond, s.controller, func() error {
		all := 0.0
		for i := range s.hosts {
			owned, err := s.metric(ctx, i, "fairlead_lb_speaker_addresses")
			if err != nil {
				return err
			}
			all += owned
		}
		if all < float64(n) {
			return fmt.Errorf("%.0f of %d addresses are announced", all, n)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// The announcements of the last addresses are repeated for some seconds.
	rest, span := time.Duration(s.bench.few(10, 1))*time.Second, time.Duration(s.bench.few(20, 1))*time.Second
	time.Sleep(rest)
	sent, err := s.metric(ctx, 0, "fairlead_lb_speaker_messages_sent_total")
	cpu, err2 := s.lbs[0].cpu()
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	time.Sleep(span)
	sentAfter, err := s.metric(ctx, 0, "fairlead_lb_speaker_messages_sent_total")
	cpuAfter, err2 := s.lbs[0].cpu()
	speaker, err3 := s.lbs[0].memory()
	controller, err4 := s.controller.memory()
	owned, err5 := s.metric(ctx, 0, "fairlead_lb_speaker_addresses")
	s.bench.say("one speaker announces %.0f of %d addresses", owned, n)
	at := fmt.Sprintf("at %d addresses", n-1)
	return []figure{
		alone("memory of the controller "+at, megabytes, controller/1e6, expectation{below: 150}),
		alone("memory of one of three speakers "+at, megabytes, speaker/1e6, expectation{below: 150}),
		alone("its CPU for a second without changes", milliseconds, milliseconds.in(cpuAfter-cpu)/span.Seconds(), expectation{below: 50}),
		alone("its messages to others", perSecond, (sentAfter-sent)/span.Seconds(), expectation{below: 50}),
	}, errors.Join(err, err2, err3, err4, err5)
}

// metric returns a metric without labels of a host's speaker.
func (s *balancers) metric(ctx context.Context, i int, name string) (float64, error) {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DialContext: s.hosts[i].dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/metrics", lbMetrics), nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("no metric %s", name)
}
