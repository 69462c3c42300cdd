package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// createRanges are the service ranges of both servers: room for more Services
// than are made.
const createRanges = "10.96.0.0/12,fd00:10:96::/112"

// creator makes Services on one server.
type creator struct {
	server *process
	config *rest.Config
	made   atomic.Int64
}

// pace is how fast Services were created, and at what cost.
type pace struct {
	rate float64       // a second
	cpu  time.Duration // of the server, for one
}

// runCreate creates Services with cluster IPs by 1, 16 and 64 clients on
// fairlead and on kube-apiserver in turn, over one etcd, and then on fairlead
// with no others and with many present.
func (b *bench) runCreate(ctx context.Context) (figures []figure, err error) {
	dir, err := os.MkdirTemp(b.dir, "create-")
	if err != nil {
		return nil, err
	}
	kubernetes, err := startKubernetes(ctx, dir, b.peers, "--service-cluster-ip-range", createRanges, "--etcd-prefix", "/kubernetes")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, kubernetes.stop()) }()
	mine, err := b.startServer(ctx, dir, kubernetes.store)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, mine.server.stop()) }()
	peer := &creator{server: kubernetes.server, config: kubernetes.config}
	for _, c := range []*creator{mine, peer} {
		if err := c.prepare(ctx, b.few(1000, 50)); err != nil {
			return nil, err
		}
	}
	first := math.NaN() // CPU for one on fairlead with few present
	for _, size := range []struct {
		clients, services int
		times             float64 // of the peer's rate that is expected
	}{{1, b.few(1000, 50), 1}, {16, b.few(2000, 40), 2}, {64, b.few(2000, 80), 3}} {
		a, err := mine.create(ctx, size.clients, size.services)
		if err != nil {
			return nil, fmt.Errorf("fairlead: %w", err)
		}
		z, err := peer.create(ctx, size.clients, size.services)
		if err != nil {
			return nil, fmt.Errorf("kube-apiserver: %w", err)
		}
		b.say("%d clients: fairlead %.0f/s, kube-apiserver %.0f/s", size.clients, a.rate, z.rate)
		who := fmt.Sprintf("%d clients", size.clients)
		if size.clients == 1 {
			who, first = "1 client", milliseconds.in(a.cpu)
		}
		figures = append(figures,
			figure{what: "Services created by " + who, unit: perSecond, fairlead: a.rate, peer: z.rate,
				peerName: "kube-apiserver", want: expectation{least: size.times}},
			figure{what: "CPU of the server for one with " + who, unit: milliseconds, fairlead: milliseconds.in(a.cpu), peer: milliseconds.in(z.cpu),
				peerName: "kube-apiserver"})
	}
	grown, err := b.grow(ctx, mine, first)
	return append(figures, grown...), err
}

// grow measures on fairlead how the cost of a create grows with the number of Services;
// first is the CPU for one, in milliseconds, with the Services of prepare.
func (b *bench) grow(ctx context.Context, c *creator, first float64) ([]figure, error) {
	many := b.few(50_000, 500)
	if _, err := c.create(ctx, writers, many-int(c.made.Load())); err != nil {
		return nil, err
	}
	if err := c.server.settle(time.Minute); err != nil {
		return nil, err
	}
	after, err := c.create(ctx, 1, b.few(1000, 50))
	if err != nil {
		return nil, err
	}
	last := milliseconds.in(after.cpu)
	return []figure{
		unpaired(fmt.Sprintf("CPU of the server for one with 1 client, %d present", many), milliseconds, last, expectation{}),
		unpaired(fmt.Sprintf("the same in that with %d present", b.few(1000, 50)), times, last/first, expectation{below: 1.25}),
	}, nil
}

// startServer starts fairlead's API server over an etcd.
func (b *bench) startServer(ctx context.Context, dir, store string) (*creator, error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	p, err := spawn(nil, dir, "server", b.fairlead, "server", "--controllers", "none", "--data-dir", data, "--etcd-servers", store,
		"--bind-address", "127.0.0.1", "--secure-port", ports[0], "--service-cluster-ip-range", createRanges)
	if err != nil {
		return nil, err
	}
	c := &creator{server: p}
	err = waitFor(ctx, time.Minute, 10*time.Millisecond, p, func() (err error) {
		if c.config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(data, "admin.kubeconfig")); err != nil {
			return err
		}
		client, err := c.client()
		if err != nil {
			return err
		}
		return client.RESTClient().Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the API server is not ready: %w", err), p.stop())
	}
	return c, nil
}

// client returns a client with its own connection.
func (c *creator) client() (*kubernetes.Clientset, error) {
	cfg := rest.CopyConfig(c.config)
	cfg.Dial = (&net.Dialer{}).DialContext
	return newClient(cfg)
}

// prepare makes the namespace and warms the server up with n Services.
func (c *creator) prepare(ctx context.Context, n int) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	if err := makeNamespace(ctx, client); err != nil {
		return err
	}
	_, err = c.create(ctx, 4, n)
	return err
}

// create makes n Services with so many clients at once.
func (c *creator) create(ctx context.Context, clients, n int) (pace, error) {
	all := make([]*kubernetes.Clientset, clients)
	for i := range all {
		var err error
		if all[i], err = c.client(); err != nil {
			return pace{}, err
		}
		// The connection is made before the clock runs.
		if _, err := all[i].Discovery().ServerVersion(); err != nil {
			return pace{}, err
		}
	}
	cpu, err := c.server.cpu()
	if err != nil {
		return pace{}, err
	}
	begin := time.Now()
	var left atomic.Int64
	left.Store(int64(n))
	g, ctx := errgroup.WithContext(ctx)
	for _, client := range all {
		g.Go(func() error {
			for left.Add(-1) >= 0 {
				if err := makeBareService(ctx, client, "s"+strconv.FormatInt(c.made.Add(1), 10)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return pace{}, errors.Join(err, c.server.alive())
	}
	took := time.Since(begin)
	after, err := c.server.cpu()
	if err != nil {
		return pace{}, err
	}
	return pace{rate: float64(n) / took.Seconds(), cpu: (after - cpu) / time.Duration(n)}, nil
}

// makeBareService creates a Service without endpoints, which must get an
// address.
func makeBareService(ctx context.Context, client kubernetes.Interface, name string) error {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: servicePort}}},
	}
	got, err := client.CoreV1().Services(benchNamespace).Create(ctx, s, metav1.CreateOptions{})
	if err == nil && got.Spec.ClusterIP == "" {
		err = fmt.Errorf("service %s has no address", name)
	}
	return err
}
