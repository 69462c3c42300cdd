package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// standalone is a running 'fairlead up' on its own host.
type standalone struct {
	*process
	*host
	client *kubernetes.Clientset
}

// startUp starts 'fairlead up' on an empty data directory; use is called again
// and again with a client of its API, without any wait for readiness, until it
// succeeds.
func (b *bench) startUp(ctx context.Context, use func(context.Context, kubernetes.Interface) error) (*standalone, error) {
	h, err := b.net.host(ctx, fmt.Sprintf("up%d", b.net.count))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(b.dir, "up-")
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	p, err := spawn(h, dir, "up", b.fairlead, "up", "--data-dir", data, "--node-name", h.name, "--node-ip", h.addr.String())
	if err != nil {
		return nil, err
	}
	up := &standalone{process: p, host: h}
	err = waitFor(ctx, time.Minute, 5*time.Millisecond, p, func() error {
		if up.client == nil {
			cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(data, "admin.kubeconfig"))
			if err != nil {
				return err
			}
			cfg.Dial = h.dial
			if up.client, err = newClient(cfg); err != nil {
				return err
			}
		}
		return use(ctx, up.client)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("fairlead up: %w", err), up.end(ctx))
	}
	return up, nil
}

func (u *standalone) end(ctx context.Context) error {
	return errors.Join(u.stop(), u.remove(context.WithoutCancel(ctx)))
}

// runStart takes the median of some starts: process start, Service and Pod
// created as soon as the API takes them, first request answered.
func (b *bench) runStart(ctx context.Context) ([]figure, error) {
	var took, api []float64
	for range b.few(5, 1) {
		t, a, err := b.start(ctx)
		if err != nil {
			return nil, err
		}
		took, api = append(took, t.Seconds()), append(api, a.Seconds())
		b.say("API after %.2f s, first answer after %.2f s", a.Seconds(), t.Seconds())
	}
	return []figure{
		unpaired(fmt.Sprintf("start of fairlead up to first answer, median of %d", len(took)), seconds, percentile(took, 0.5),
			expectation{below: 3}),
		unpaired("of which until the API has taken the Service", seconds, percentile(api, 0.5), expectation{}),
	}, nil
}

// start returns the times from process start to the first answer and to the
// creation of the Service.
func (b *bench) start(ctx context.Context) (answered, created time.Duration, err error) {
	var s service
	up, err := b.startUp(ctx, func(ctx context.Context, client kubernetes.Interface) error {
		got, err := client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, helloService(), metav1.CreateOptions{})
		if err != nil {
			return err
		}
		a, err := netip.ParseAddr(got.Spec.ClusterIP)
		s.at = netip.AddrPortFrom(a, servicePort)
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, up.end(ctx)) }()
	created = time.Since(up.begin)
	err = waitFor(ctx, 20*time.Second, 5*time.Millisecond, up.process, func() error {
		_, err := up.client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, b.helloPod(), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("create the pod: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var at time.Time
	err = up.on(func() (err error) {
		at, err = until(limited, s.at, loadPause, func(netip.Addr) bool { return true })
		return err
	})
	if err != nil {
		return 0, 0, errors.Join(err, up.alive())
	}
	return at.Sub(up.begin), created, nil
}

func helloService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "hello"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "hello"},
			Ports:    []corev1.ServicePort{{Port: servicePort, TargetPort: intstr.FromInt32(backendPort)}},
		},
	}
}

// helloPod runs this program as a backend.
func (b *bench) helloPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "hello", Labels: map[string]string{"app": "hello"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "host", Command: []string{b.self, backendCommand},
		}}},
	}
}

// runMemory reads the memory of 'fairlead up' a while after 1,000 services with
// 10 endpoints each have been written and are answered.
func (b *bench) runMemory(ctx context.Context) (figures []figure, err error) {
	up, err := b.startUp(ctx, makeNamespace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, up.end(ctx)) }()
	empty, err := up.memory()
	if err != nil {
		return nil, err
	}
	services, err := fill(ctx, up.client, shape{prefix: "svc", services: b.few(1000, 50), endpoints: b.few(10, 3)})
	if err != nil {
		return nil, err
	}
	for _, s := range services {
		if _, err := waitAnswer(ctx, up.host, s); err != nil {
			return nil, errors.Join(err, up.alive())
		}
	}
	select {
	case <-time.After(time.Duration(b.few(10, 1)) * time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	full, err := up.memory()
	if err != nil {
		return nil, err
	}
	peak, err := up.peak()
	if err != nil {
		return nil, err
	}
	file, err := up.kilobytes("smaps_rollup", "Pss_File:")
	return []figure{
		unpaired(fmt.Sprintf("memory of fairlead up with %d services x %d", len(services), services[0].count), megabytes, full/1e6,
			expectation{below: 200}),
		unpaired("of which pages of the program file", megabytes, file/1e6, expectation{below: 90}), // 100 MB without kernel/residence
		unpaired("the same before the first service", megabytes, empty/1e6, expectation{}),
		unpaired("the same at its most", megabytes, peak/1e6, expectation{}),
	}, err
}
