package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
			unpaired(fmt.Sprintf("%d Services created to the last one has its address", n), seconds, took.Seconds(), expectation{}),
			unpaired("CPU of the controller for one", milliseconds, milliseconds.in(after-cpu)/float64(n), expectation{}),
		}, cost...)
		return err
	})
	return figures, err
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
		unpaired("memory of the controller "+at, megabytes, controller/1e6, expectation{below: 150}),
		unpaired("memory of one of three speakers "+at, megabytes, speaker/1e6, expectation{below: 150}),
		unpaired("its CPU for a second without changes", milliseconds, milliseconds.in(cpuAfter-cpu)/span.Seconds(), expectation{below: 50}),
		unpaired("its messages to others", perSecond, (sentAfter-sent)/span.Seconds(), expectation{below: 50}),
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
