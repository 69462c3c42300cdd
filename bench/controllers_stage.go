package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// crowd is how many Services there are, with how many ready Pods each.
type crowd struct {
	services, pods int
	// filled is how many of the Services have Pods; 0 is all.
	filled int
}

func (c crowd) String() string {
	if c.filled > 0 {
		return fmt.Sprintf("%d services", c.services)
	}
	return fmt.Sprintf("%d services x %d pods", c.services, c.pods)
}

// withPods is how many of the Services have Pods.
func (c crowd) withPods() int { return cmp.Or(c.filled, c.services) }

// total is how many Pods there are.
func (c crowd) total() int { return c.withPods() * c.pods }

// stage is an API server with Services and Pods, and no controllers yet.
type stage struct {
	*api
	b    *bench
	size crowd
	// turn counts single changes: each Pod is ready until its first one.
	turn  int
	ready map[string]bool
	marks int
}

// stage sets up an API server with a crowd, calls play, and ends it.
func (b *bench) stage(ctx context.Context, size crowd, play func(*stage) error) (err error) {
	a, err := b.startRoomyAPI(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	s := &stage{api: a, b: b, size: size, ready: map[string]bool{}}
	if err := s.seed(ctx); err != nil {
		return fmt.Errorf("make %s: %w", size, err)
	}
	if err := a.settle(time.Minute); err != nil {
		return err
	}
	return play(s)
}

// startRoomyAPI starts an API server that collects its garbage seldom. Otherwise
// about one change in a hundred falls into a collection, and whether the p99 is
// one of those is chance.
func (b *bench) startRoomyAPI(ctx context.Context) (*api, error) {
	for name, value := range map[string]string{"GOGC": "400", "GOMEMLIMIT": "2GiB"} {
		if old, ok := os.LookupEnv(name); ok {
			defer os.Setenv(name, old)
		} else {
			defer os.Unsetenv(name)
		}
		if err := os.Setenv(name, value); err != nil {
			return nil, err
		}
	}
	return b.startAPI(ctx)
}

// enter starts a manager and waits until it has been through everything: every
// Pod is in a slice, a Service made after the start has its slice and Endpoints,
// and the manager is idle.
func (s *stage) enter(ctx context.Context, m manager) (*process, effort, error) {
	var e effort
	dir, err := os.MkdirTemp(s.b.dir, m.name+"-")
	if err != nil {
		return nil, e, err
	}
	before, err := s.writes(ctx)
	if err != nil {
		return nil, e, err
	}
	p, err := m.start(dir, s.kubeconfig)
	if err != nil {
		return nil, e, err
	}
	err = s.complete(ctx, s.size)
	e.took = time.Since(p.begin).Seconds()
	if err == nil {
		err = s.mark(ctx, p)
	}
	if err == nil {
		e.writes, e.cpu, err = s.since(ctx, p, before, 0)
		e.writes -= markWrites
	}
	if err != nil {
		return nil, e, fmt.Errorf("%s: %w", m.name, errors.Join(err, p.alive(), p.stop()))
	}
	return p, e, nil
}

// markWrites is what a Service without Pods costs: a slice and Endpoints.
const markWrites = 2

// mark makes a Service that selects nothing and waits for what a manager makes
// of it. A program that waits for the processor looks idle; this shows that it
// works.
func (s *stage) mark(ctx context.Context, p *process) error {
	s.marks++
	service := selectingService(0)
	service.Name = fmt.Sprintf("mark-%d", s.marks)
	service.Spec.Selector = map[string]string{"app": service.Name}
	if _, err := s.client.CoreV1().Services(benchNamespace).Create(ctx, service, metav1.CreateOptions{}); err != nil {
		return err
	}
	err := waitFor(ctx, controllerWait, 200*time.Millisecond, p, func() error {
		if _, err := s.client.CoreV1().Endpoints(benchNamespace).Get(ctx, service.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		list, err := s.client.DiscoveryV1().EndpointSlices(benchNamespace).List(ctx, metav1.ListOptions{
			ResourceVersion: "0", LabelSelector: discoveryv1.LabelServiceName + "=" + service.Name,
		})
		if err == nil && len(list.Items) == 0 {
			err = errors.New("no slice")
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", service.Name, err)
	}
	return p.settle(controllerWait)
}

// spend measures what a manager does about f, until it is idle.
func (s *stage) spend(ctx context.Context, p *process, f func() error) (effort, error) {
	var e effort
	before, err := s.writes(ctx)
	if err != nil {
		return e, err
	}
	cpu, err := p.cpu()
	if err != nil {
		return e, err
	}
	begin := time.Now()
	if err := f(); err != nil {
		return e, err
	}
	e.took = time.Since(begin).Seconds()
	if err := p.settle(controllerWait); err != nil {
		return e, err
	}
	e.writes, e.cpu, err = s.since(ctx, p, before, cpu)
	return e, err
}

func (s *stage) since(ctx context.Context, p *process, writes float64, cpu time.Duration) (float64, float64, error) {
	now, err := s.writes(ctx)
	if err != nil {
		return 0, 0, err
	}
	used, err := p.cpu()
	return now - writes, (used - cpu).Seconds(), err
}

// writes counts the requests of all clients so far that write EndpointSlices or
// Endpoints, as the API server reports them.
func (s *stage) writes(ctx context.Context) (float64, error) {
	text, err := s.client.RESTClient().Get().AbsPath("/metrics").Do(ctx).Raw()
	if err != nil {
		return 0, fmt.Errorf("metrics of the API server: %w", err)
	}
	total := 0.0
	for line := range bytes.Lines(text) {
		rest, ok := bytes.CutPrefix(line, []byte("apiserver_request_total{"))
		if !ok {
			continue
		}
		labels, value, _ := strings.Cut(string(rest), "} ")
		if !strings.Contains(labels, `resource="endpoints"`) && !strings.Contains(labels, `resource="endpointslices"`) {
			continue
		}
		for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE"} {
			if strings.Contains(labels, `verb="`+verb+`"`) {
				n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
				if err != nil {
					return 0, fmt.Errorf("metrics of the API server: %w", err)
				}
				total += n
			}
		}
	}
	return total, nil
}

// complete waits until the slices hold exactly as many endpoints as there are
// Pods.
func (s *stage) complete(ctx context.Context, size crowd) error {
	ctx, cancel := context.WithTimeout(ctx, controllerWait)
	defer cancel()
	for total := 0; ; {
		done, err := s.follow(ctx, size.total(), &total)
		if ctx.Err() != nil {
			return fmt.Errorf("%d of %d endpoints after %s", total, size.total(), controllerWait)
		}
		if done || err != nil {
			return err
		}
	}
}

// follow counts the endpoints of all slices by a watch, for a list of all again
// and again would keep the API server from its work. It returns false when the
// server ends the watch, as it does with a client that cannot keep up.
func (s *stage) follow(ctx context.Context, want int, total *int) (bool, error) {
	w, err := s.client.DiscoveryV1().EndpointSlices(benchNamespace).Watch(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return false, err
	}
	defer w.Stop()
	endpoints := map[string]int{}
	for *total = 0; *total != want; {
		e, open := <-w.ResultChan()
		if !open {
			return false, nil
		}
		slice, ok := e.Object.(*discoveryv1.EndpointSlice)
		if !ok {
			return false, fmt.Errorf("the watch of slices brought %v", e.Object)
		}
		now := len(slice.Endpoints)
		if e.Type == watch.Deleted {
			now = 0
		}
		*total += now - endpoints[slice.Name]
		endpoints[slice.Name] = now
	}
	return true, nil
}

// create makes the Services and Pods of a crowd by the API, as many clients
// would.
func (s *stage) create(ctx context.Context, size crowd) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range size.services {
		g.Go(func() error {
			_, err := s.client.CoreV1().Services(benchNamespace).Create(ctx, selectingService(i), metav1.CreateOptions{})
			return err
		})
		for j := range size.pods {
			g.Go(func() error { return s.createPod(ctx, i, podName(i, j), i*size.pods+j) })
		}
	}
	return g.Wait()
}

// createPod makes a Pod and then, as a kubelet would, writes that it is ready.
func (s *stage) createPod(ctx context.Context, i int, name string, address int) error {
	pod := readyPod(i, name, address)
	status := pod.Status
	made, err := s.client.CoreV1().Pods(benchNamespace).Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create pod: %w", err)
	}
	made.Status = status
	_, err = s.client.CoreV1().Pods(benchNamespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
	return err
}

// replace deletes each Pod of the only Service after a new one is ready, a few
// at a time.
func (s *stage) replace(ctx context.Context, size crowd, prefix string) error {
	list, err := s.client.CoreV1().Pods(benchNamespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	if len(list.Items) != size.pods {
		return fmt.Errorf("%d pods, want %d", len(list.Items), size.pods)
	}
	s.turn += size.pods // the new Pods have their own addresses
	first, now := s.turn, int64(0)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers / 4)
	for j := range list.Items {
		g.Go(func() error {
			if err := s.createPod(ctx, 0, fmt.Sprintf("%s-%d", prefix, j), first+j); err != nil {
				return err
			}
			return s.client.CoreV1().Pods(benchNamespace).Delete(ctx, list.Items[j].Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
		})
	}
	return g.Wait()
}

func (s *stage) socket() string {
	return filepath.Join(filepath.Dir(s.kubeconfig), "data", "etcd", "client.sock")
}
