package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	podNode          = "podnode"       // the node all Pods say they are on; no agent runs it
	controllerWait   = 5 * time.Minute // for any one thing the controllers have to do
	controllerRounds = 2               // turns each manager gets at single changes
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
			"--leader-elect=false", "--kube-api-qps", "5000", "--kube-api-burst", "5000",
			"--kube-api-content-type", "application/vnd.kubernetes.protobuf")
	}}
}

// managers are the programs that take part, fairlead first.
func (b *bench) managers() []manager {
	list := []manager{b.fairleadControllers()}
	if b.peer("kube-controller-manager") != "" {
		list = append(list, b.kubeControllerManager())
	}
	return list
}

// effort is what a piece of work took.
type effort struct {
	took   float64 // seconds until it could be seen that it was done
	cpu    float64 // seconds of the manager's CPU until it was idle again
	writes float64 // of EndpointSlices and Endpoints, refused ones as well
}

// managerResult is what was measured of one manager.
type managerResult struct {
	cold, flip, large effort // of one change, the last two
	flips, largeFlips []float64
	takeover          effort
	created, restart  effort
	full              effort
	memory            float64 // bytes, of the manager at its most pods
}

// runControllers gives both managers the same API server in turn, one such
// server for each scene.
func (b *bench) runControllers(ctx context.Context) ([]figure, error) {
	// What is compared are the controllers. The disk of the API server would
	// only add its own moments, so its data are in memory.
	inMemory := *b
	dir, err := os.MkdirTemp("/run", "controllers-")
	if err != nil {
		return nil, err
	}
	inMemory.dir = dir
	b = &inMemory
	results := make([]managerResult, len(b.managers()))
	for _, scene := range []func(context.Context, []managerResult) error{
		b.sceneChanges, b.sceneLarge, b.sceneCreated, b.sceneRestart, b.sceneFull,
	} {
		if err := scene(ctx, results); err != nil {
			return nil, err
		}
	}
	return b.controllerFigures(results), os.RemoveAll(dir)
}

// sceneChanges: 1,000 Services x 10 Pods from a cold start, and then single
// changes. The managers take turns, so that what else the machine does meets
// both.
func (b *bench) sceneChanges(ctx context.Context, results []managerResult) error {
	size := b.changesSize()
	return b.stage(ctx, size, func(s *stage) error {
		for round := range controllerRounds {
			for i, m := range b.managers() {
				r := &results[i]
				if round == 0 {
					if err := s.wipe(ctx); err != nil {
						return err
					}
				}
				p, start, err := s.enter(ctx, m)
				if err != nil {
					return err
				}
				if round == 0 {
					r.cold = start
				} else {
					r.takeover = start
				}
				list, one, err := s.flips(ctx, p, b.few(150, 5))
				if err := errors.Join(err, p.alive(), p.stop()); err != nil {
					return fmt.Errorf("%s: %w", m.name, err)
				}
				r.flips, r.flip = append(r.flips, list...), one
				b.say("%s: all slices of %s after %.2f s; pod to slice p50 %.1f ms, p99 %.1f ms", m.name, size, start.took, percentile(list, 0.5),
					percentile(list, 0.99))
			}
		}
		return nil
	})
}

// sceneLarge: single changes among 10,000 Services of one namespace.
func (b *bench) sceneLarge(ctx context.Context, results []managerResult) error {
	size := b.largeSize()
	return b.stage(ctx, size, func(s *stage) error {
		for i, m := range b.managers() {
			p, start, err := s.enter(ctx, m)
			if err != nil {
				return err
			}
			results[i].largeFlips, results[i].large, err = s.flips(ctx, p, b.few(200, 5))
			if err := errors.Join(err, p.alive(), p.stop()); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
			b.say("%s: all slices of %s after %.2f s; pod to slice p50 %.1f ms", m.name, size, start.took, percentile(results[i].largeFlips, 0.5))
		}
		return nil
	})
}

// sceneCreated: Services and Pods are created while the manager runs.
func (b *bench) sceneCreated(ctx context.Context, results []managerResult) error {
	size := b.changesSize()
	return b.stage(ctx, crowd{}, func(s *stage) error {
		for i, m := range b.managers() {
			p, _, err := s.enter(ctx, m)
			if err != nil {
				return err
			}
			results[i].created, err = s.spend(ctx, p, func() error { return s.create(ctx, size) })
			if err := errors.Join(err, s.complete(ctx, size), p.alive(), p.stop(), s.clear(ctx)); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
			b.say("%s: %s created: %.2f s of CPU, %.0f writes", m.name, size, results[i].created.cpu, results[i].created.writes)
		}
		return nil
	})
}

// sceneRestart: all Pods of one large Service are replaced.
func (b *bench) sceneRestart(ctx context.Context, results []managerResult) error {
	size := b.restartSize()
	return b.stage(ctx, size, func(s *stage) error {
		for i, m := range b.managers() {
			p, _, err := s.enter(ctx, m)
			if err != nil {
				return err
			}
			results[i].restart, err = s.spend(ctx, p, func() error { return s.replace(ctx, size, fmt.Sprintf("new%d", i)) })
			if err := errors.Join(err, s.complete(ctx, size), p.alive(), p.stop()); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
			b.say("%s: %d pods replaced: %.2f s of CPU, %.0f writes", m.name, size.pods, results[i].restart.cpu, results[i].restart.writes)
		}
		return nil
	})
}

// sceneFull: 100,000 Pods.
func (b *bench) sceneFull(ctx context.Context, results []managerResult) error {
	size := b.fullSize()
	return b.stage(ctx, size, func(s *stage) error {
		for i, m := range b.managers() {
			if err := s.wipe(ctx); err != nil {
				return err
			}
			p, start, err := s.enter(ctx, m)
			if err != nil {
				return err
			}
			results[i].full = start
			results[i].memory, err = p.memory()
			if err := errors.Join(err, p.alive(), p.stop()); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
			b.say("%s: all slices of %s after %.2f s, %.0f MB", m.name, size, start.took, results[i].memory/1e6)
		}
		return nil
	})
}

func (b *bench) changesSize() crowd { return crowd{services: b.few(1000, 20), pods: 10} }
func (b *bench) largeSize() crowd {
	return crowd{services: b.few(10000, 50), pods: 1, filled: b.few(1000, 20)}
}
func (b *bench) restartSize() crowd { return crowd{services: 1, pods: b.few(5000, 150)} }
func (b *bench) fullSize() crowd    { return crowd{services: b.few(100, 3), pods: b.few(1000, 200)} }

// controllerFigures are the lines of the table; without the peer it has
// only fairlead's column.
func (b *bench) controllerFigures(results []managerResult) []figure {
	var out []figure
	add := func(what string, u unit, want expectation, value func(*managerResult) float64) {
		f := unpaired(what, u, value(&results[0]), want)
		if len(results) > 1 {
			f.peer, f.peerName = value(&results[1]), "kube-controller-manager"
		}
		out = append(out, f)
	}
	half, third, never := expectation{share: 0.5}, expectation{share: 1. / 3}, expectation{share: 1}
	latency := func(size crowd, list func(*managerResult) []float64) {
		for _, p := range []float64{0.50, 0.99} {
			add(fmt.Sprintf("pod status to slice at %s, p%.0f of %d", size, p*100, len(list(&results[0]))), milliseconds, half,
				func(r *managerResult) float64 { return percentile(list(r), p) })
		}
	}
	latency(b.changesSize(), func(r *managerResult) []float64 { return r.flips })
	add("CPU for one change of a pod", milliseconds, third, func(r *managerResult) float64 { return r.flip.cpu * 1000 })
	add("writes for one change of a pod", writes, never, func(r *managerResult) float64 { return r.flip.writes })
	latency(b.largeSize(), func(r *managerResult) []float64 { return r.largeFlips })
	add("CPU for one change of a pod", milliseconds, third, func(r *managerResult) float64 { return r.large.cpu * 1000 })
	load := func(what string, of func(*managerResult) *effort, time bool) {
		if time {
			add(what, seconds, expectation{}, func(r *managerResult) float64 { return of(r).took })
			what = "… its"
		}
		add(what+" CPU", seconds, third, func(r *managerResult) float64 { return of(r).cpu })
		add("… its writes", writes, never, func(r *managerResult) float64 { return of(r).writes })
	}
	load(fmt.Sprintf("cold start at %s", b.changesSize()), func(r *managerResult) *effort { return &r.cold }, true)
	add("… writes when it takes over from the other", writes, never, func(r *managerResult) float64 { return r.takeover.writes })
	load(fmt.Sprintf("%s created:", b.changesSize()), func(r *managerResult) *effort { return &r.created }, false)
	load(fmt.Sprintf("%d pods of a service replaced:", b.restartSize().pods), func(r *managerResult) *effort { return &r.restart }, false)
	load(fmt.Sprintf("cold start at %s", b.fullSize()), func(r *managerResult) *effort { return &r.full }, true)
	add("… memory of the controllers", megabytes, expectation{}, func(r *managerResult) float64 { return r.memory / 1e6 })
	return out
}
