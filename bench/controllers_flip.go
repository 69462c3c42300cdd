package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

const (
	flipLimit = 30 * time.Second
	flipPause = 50 * time.Millisecond
)

// observer is a client that follows Pods and slices, each over a connection of
// its own, so that neither has to wait for the other.
type observer struct{ pods, slices watch.Interface }

func (s *stage) observe(ctx context.Context) (*observer, error) {
	var o observer
	for _, start := range []func() error{
		func() error {
			client, err := newClient(s.config)
			if err != nil {
				return err
			}
			now, err := client.CoreV1().Pods(benchNamespace).List(ctx, metav1.ListOptions{Limit: 1})
			if err != nil {
				return err
			}
			o.pods, err = client.CoreV1().Pods(benchNamespace).Watch(ctx, metav1.ListOptions{ResourceVersion: now.ResourceVersion})
			return err
		},
		func() error {
			client, err := newClient(s.config)
			if err != nil {
				return err
			}
			now, err := client.DiscoveryV1().EndpointSlices(benchNamespace).List(ctx, metav1.ListOptions{Limit: 1})
			if err != nil {
				return err
			}
			o.slices, err = client.DiscoveryV1().EndpointSlices(benchNamespace).Watch(ctx, metav1.ListOptions{ResourceVersion: now.ResourceVersion})
			return err
		},
	} {
		if err := start(); err != nil {
			o.stop()
			return nil, err
		}
	}
	return &o, nil
}

func (o *observer) stop() {
	for _, w := range []watch.Interface{o.pods, o.slices} {
		if w != nil {
			w.Stop()
		}
	}
}

// flips changes the readiness of Pods, one at a time and each of another
// Service, and returns the times in milliseconds between the two moments at
// which one observer of the API sees the Pod and the slice change. The effort
// is that of one change.
func (s *stage) flips(ctx context.Context, p *process, n int) ([]float64, effort, error) {
	o, err := s.observe(ctx)
	if err != nil {
		return nil, effort{}, err
	}
	defer o.stop()
	var list []float64
	e, err := s.spend(ctx, p, func() error {
		for range n {
			time.Sleep(flipPause)
			name := podName(s.turn*7%s.size.withPods(), s.turn%s.size.pods)
			s.turn++
			d, err := s.flip(ctx, o, name)
			if err != nil {
				return fmt.Errorf("change of pod %s: %w", name, err)
			}
			list = append(list, milliseconds.in(d))
		}
		return nil
	})
	e.cpu, e.writes = e.cpu/float64(n), e.writes/float64(n)
	return list, e, err
}

// flip changes the readiness of one Pod.
func (s *stage) flip(ctx context.Context, o *observer, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, flipLimit)
	defer cancel()
	s.ready[name] = !s.isReady(name)
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": readiness(s.ready[name])}})
	if err != nil {
		return 0, err
	}
	// The answer comes after the first watch event; it is not waited for.
	written := make(chan error, 1)
	go func() {
		_, err := s.client.CoreV1().Pods(benchNamespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		written <- err
	}()
	took, err := o.between(ctx, name, s.ready[name])
	if failed := <-written; failed != nil {
		return 0, failed
	}
	return took, err
}

// isReady: every Pod is until it is changed for the first time.
func (s *stage) isReady(name string) bool {
	ready, changed := s.ready[name]
	return ready || !changed
}

// between waits for both changes and returns the time from the one of the Pod
// to the one of the slice.
func (o *observer) between(ctx context.Context, pod string, ready bool) (time.Duration, error) {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	var podAt, sliceAt time.Time
	for podAt.IsZero() || sliceAt.IsZero() {
		select {
		case e, open := <-o.pods.ResultChan():
			if !open {
				return 0, fmt.Errorf("the watch of Pods ended")
			}
			if p, ok := e.Object.(*corev1.Pod); ok && p.Name == pod && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == status
			}) {
				podAt = time.Now()
			}
		case e, open := <-o.slices.ResultChan():
			if !open {
				return 0, fmt.Errorf("the watch of slices ended")
			}
			if s, ok := e.Object.(*discoveryv1.EndpointSlice); ok && slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
				return e.TargetRef != nil && e.TargetRef.Name == pod && e.Conditions.Ready != nil && *e.Conditions.Ready == ready
			}) {
				sliceAt = time.Now()
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("the change was not seen: %w", ctx.Err())
		}
	}
	return max(sliceAt.Sub(podAt), 0), nil
}
