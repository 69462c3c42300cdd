// Package runner runs the Pods bound to this node as ordinary processes of the
// machine, each Pod in its own network namespace, and reports their status.
//
// Runner wires the parts together: it follows the API and hands each object to
// the part that keeps it. See README.md.
package runner

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/loop"
	podregistry "github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/pod"
	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/registered"
	"github.com/fairlead/fairlead/internal/runner/static"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
)

// Runner runs the Pods of one node.
type Runner struct {
	o           Options
	events      *events.Recorder
	services    services
	network     *podnet.Network
	hostPorts   *podnet.HostPorts
	confinement *confinement.Confinement
	groups      *confinement.Groups
	pods        *pod.Pods
	programs    *registered.Programs
	static      *static.Pods
	api         *api.Server
	cert        api.Certificate
	units       *systemd.Bus
	changed     loop.Signal // see Changed
	outage      outage
	held        atomic.Bool // by Options.Hold
	schedulable atomic.Bool // this node is known and not cordoned
}

// New prepares a Runner: it makes the state directory and, for an endpoint, a
// certificate if there is none yet.
func New(o Options) (*Runner, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	r := &Runner{
		o: o, changed: loop.NewSignal(), outage: outage{wake: loop.NewSignal()},
		units: systemd.NewBus(o.Log), groups: confinement.OpenGroups(o.StateDir, o.PodPIDs),
		hostPorts: podnet.NewHostPorts(pod.EarlierHostPorts(podsDir(o.StateDir)), o.PodsChanged),
		events:    events.NewRecorder(o.Client, corev1.EventSource{Component: "fairlead-runner", Host: o.NodeName}, o.Log),
	}
	r.held.Store(o.Hold != nil)
	// The Node's conditions name what this machine does not allow as well, and a Pod with limits gets an Event: a start
	// of every day is no reason to warn.
	if o.Protect {
		if err := r.groups.Protect(); err != nil {
			o.Log.Info("cannot protect the agent when memory is short", "err", err)
		}
	}
	if r.groups.Err != nil {
		o.Log.Info("cannot enforce limits of Pods", "err", r.groups.Err)
	}
	var err error
	if r.confinement, err = confinement.New(confinement.Options{
		UIDs: o.UIDs, StateDir: o.StateDir, Hide: o.Hide, Used: func(namespace string) bool { return r.pods.Has(namespace) }, Log: o.Log,
	}); err != nil {
		return nil, err
	}
	if o.Listener != nil {
		if r.cert, err = api.LoadCertificate(o.StateDir, o.NodeName); err != nil {
			return nil, err
		}
	}
	r.connect()
	return r, nil
}

// connect makes the parts and gives each what it needs of the others.
func (r *Runner) connect() {
	o := r.o
	r.network = podnet.New(podnet.Options{
		NodeName: o.NodeName, StateDir: o.StateDir, Device: o.Device,
		ClusterCIDRs: o.ClusterCIDRs, ServiceCIDRs: o.ServiceCIDRs, ServerAddrs: o.ServerAddrs,
		Mode: o.PodNetwork, Overlay: o.Overlay, WireGuard: o.WireGuard, Plain: o.Plain, Early: o.StaticDir != "",
		Events: r.events, Usable: r.nudgeAll, Changed: func() { r.changed.Set(); r.outage.wake.Set() }, Log: o.Log,
	})
	metrics := pod.NewMetrics()
	r.pods = pod.New(pod.Options{
		Client: o.Client, Dir: podsDir(o.StateDir), ShimCommand: o.ShimCommand, LogLimit: o.LogLimit,
		Images: o.Images, ClusterDNS: o.ClusterDNS, ClusterDomain: o.ClusterDomain,
		BackOff: o.BackOff, StopTimeout: o.StopTimeout, DrainWait: o.DrainWait,
		Network: r.network, HostPorts: r.hostPorts, Confinement: r.confinement, Groups: r.groups, Metrics: metrics, Events: r.events,
		MayStart: r.mayStart, ServiceVars: r.services.variables, Selected: r.services.selected,
		Found: o.PodsChanged, Ended: func() { r.static.Nudge() }, Outage: &r.outage.state, Log: o.Log,
	})
	r.programs = registered.New(registered.Options{
		Client: o.Client, Units: r.units, HostIPs: r.network.HostIPs, Schedulable: r.schedulable.Load,
		Selected: r.services.selected, Probed: metrics.Probed,
		Events: r.events, Found: o.PodsChanged, Outage: &r.outage.state, Log: o.Log,
	})
	r.static = static.New(static.Options{
		NodeName: o.NodeName, Dir: o.StaticDir, Workers: r.pods, Client: o.Client, Mirrors: o.Mirrors, NodeUID: r.network.NodeUID,
		Complete: podregistry.Complete, Events: r.events, Log: o.Log,
	})
	r.api = api.New(api.Options{
		NodeName: o.NodeName, Listener: o.Listener, Certificate: r.cert, ClientCA: o.ClientCA, Status: o.Status, Views: o.Views,
		Handlers: o.Handlers, Trace: o.Trace,
		Pods: r.pods.Snapshots, Registered: r.programs.Has, Groups: r.groups, Log: o.Log,
	})
}

// Run runs Pods until ctx ends. It returns an error if it cannot begin.
func (r *Runner) Run(ctx context.Context) error {
	lock, err := lockDir(r.o.StateDir)
	if err != nil {
		return err
	}
	defer func() { _ = fileio.Unlock(lock) }()
	defer r.events.Start()()
	if err := r.network.LoadLast(); err != nil {
		r.o.Log.Warn("cannot read the last addresses of pods; they may be reused early", "err", err)
	}
	// Workers outlive ctx for as long as StopPods needs.
	workCtx, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer func() { // after the workers, which make groups
		if err := r.groups.Release(); err != nil {
			r.o.Log.Warn("cannot take the limits from pods; systemd before 254 may not start the agent's unit again while they live", "err", err)
		}
	}()
	defer r.programs.Wait()
	defer r.pods.Wait()
	defer stopWork()
	if err := r.pods.Begin(workCtx); err != nil {
		return err
	}
	infCtx, stopInformers := context.WithCancel(ctx)
	var others sync.WaitGroup
	others.Go(func() { r.follow(infCtx, workCtx) })
	others.Go(func() { r.network.Run(infCtx) })
	others.Go(func() { r.units.Run(infCtx) })
	others.Go(func() { r.static.Run(infCtx) })
	others.Go(func() { r.awaitHold(infCtx) })
	others.Go(func() { r.outage.run(infCtx, r.failure, r.publish) })
	if r.o.Listener != nil {
		others.Go(func() { r.api.Run(infCtx) })
	}
	<-ctx.Done()
	r.programs.Stop()
	if r.o.StopPods {
		r.pods.Stop()
		if err := r.network.Remove(); err != nil {
			r.o.Log.Error("cannot remove the pods' network", "err", err)
		}
	}
	stopInformers()
	others.Wait()
	return nil
}

// awaitHold starts the Pods that wait for Options.Hold.
func (r *Runner) awaitHold(ctx context.Context) {
	select {
	case <-r.o.Hold: // never, if it is nil
	case <-ctx.Done():
		return
	}
	r.held.Store(false)
	r.pods.Nudge()
}

// mayStart reports whether Pods of the API server may start.
func (r *Runner) mayStart() bool {
	_, synced := r.services.known()
	return synced && !r.held.Load()
}

// failure returns why the last attempt to connect the node's Pods failed, nil if there was none.
func (r *Runner) failure() error {
	if err := r.network.Healthy(); !errors.Is(err, podnet.ErrNoRange) {
		return err
	}
	return nil
}

// publish has the statuses of all Pods written after the outage has changed.
func (r *Runner) publish(why string) {
	if why != "" {
		r.o.Log.Warn("this node cannot connect its pods; reporting them as not ready", "err", why)
	} else {
		r.o.Log.Info("this node connects its pods again")
	}
	r.pods.Publish()
	r.programs.Publish()
}

// nudgeAll has every Pod take its next step.
func (r *Runner) nudgeAll() {
	r.pods.Nudge()
	r.programs.Nudge()
	r.static.Nudge()
}

// Fingerprint is the SHA-256 of the endpoint's certificate in DER form, in
// hexadecimal; empty without a Listener. It is published in
// svc.ServingCertAnnotation.
func (r *Runner) Fingerprint() string { return r.cert.Fingerprint }

// PublicKey is this node's value of svc.PublicKeyAnnotation, "" if it does not encrypt.
func (r *Runner) PublicKey() string {
	if r.o.WireGuard == nil {
		return ""
	}
	return r.o.WireGuard.PublicKey().String()
}

// Healthy returns why this node cannot run pods now, nil if it can.
func (r *Runner) Healthy() error { return r.network.Healthy() }

// Condition returns the Node condition PodsRouted.
func (r *Runner) Condition() corev1.NodeCondition { return r.network.Condition() }

// Masquerading returns the Node condition PodsMasqueraded.
func (r *Runner) Masquerading() corev1.NodeCondition { return r.network.Masquerading() }

// SourcesChecked returns the Node condition PodsSourcesChecked.
func (r *Runner) SourcesChecked() corev1.NodeCondition { return r.network.Sources.Condition() }

// Limits returns the Node condition PodsLimited.
func (r *Runner) Limits() corev1.NodeCondition { return r.groups.Condition() }

// Confinement returns the Node condition PodsConfined.
func (r *Runner) Confinement() corev1.NodeCondition { return r.confinement.Condition() }

// Changed is set when Healthy or a condition may have changed.
func (r *Runner) Changed() <-chan struct{} { return r.changed }

// WaitReady waits until Pods bound to this node are started.
func (r *Runner) WaitReady(ctx context.Context) error {
	select {
	case <-r.network.Ready():
		return nil
	case <-ctx.Done():
		return errors.Join(ctx.Err(), r.Healthy())
	}
}

// HostPorts returns the host ports of this node's Pods, in no order. It is safe for concurrent use.
func (r *Runner) HostPorts() []svc.HostPorts { return r.hostPorts.All() }

// OwnPods returns what this node has found out of its Pods, by the UIDs that the API has for them, also while no
// server can be told. It is safe for concurrent use.
func (r *Runner) OwnPods() map[string]svc.OwnPod {
	out := map[string]svc.OwnPod{}
	r.pods.Own(out)
	r.programs.Own(out)
	return out
}

// Summary measures the node and its Pods, for half a second.
func (r *Runner) Summary(ctx context.Context) (api.Summary, error) { return r.api.Summary(ctx) }

// Describe and Collect implement prometheus.Collector.
func (r *Runner) Describe(out chan<- *prometheus.Desc) { r.pods.Describe(out) }

// Collect implements prometheus.Collector.
func (r *Runner) Collect(out chan<- prometheus.Metric) { r.pods.Collect(out) }
