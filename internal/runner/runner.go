// Package runner runs the Pods bound to this node as ordinary processes of the
// machine, each pod in a network namespace of its own, and reports their status.
//
// The pieces, from the outside in: Runner follows the API and keeps one worker
// per pod; a worker is a loop that owns the state of its pod and takes the next
// possible step; the processes themselves belong to a shim (package shim) that
// outlives the agent. See README.md.
package runner

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/dns/resolvconf"
	"github.com/fairlead/fairlead/internal/env"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/systemd"
)

// DefaultPodPIDs is the default of Options.PodPIDs.
const DefaultPodPIDs = 1024

// Options configure a Runner.
type Options struct {
	// Client talks to the API server. Its rate limit should be far above
	// client-go's default of 5 a second.
	Client   kubernetes.Interface
	NodeName string
	// StateDir holds what must survive a restart, mode 0700; nothing else may
	// use it.
	StateDir string
	// ShimCommand starts a shim, by default the embedded program, or without one
	// this program with "pod-shim", for which it must import package shim/early.
	ShimCommand []string
	// Device is the network device that holds the node's own addresses among
	// its pods, by default fl0.
	Device string
	// ClusterCIDRs are the ranges of all pods of the cluster. Packets of pods to
	// other places get the node's address, and a Node whose range is not a part of
	// them gets no routes.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are the ranges of ClusterIPs, ServerAddrs the addresses of the
	// API server: no route to pods may take them.
	ServiceCIDRs []netip.Prefix
	ServerAddrs  []netip.Addr
	// ClusterDNS are the name servers of pods, ClusterDomain the domain they
	// serve, by default cluster.local.
	ClusterDNS    []netip.Addr
	ClusterDomain string
	// Listener is where the HTTPS endpoint for logs, exec and port-forward is
	// served; nil for none. Run closes it.
	Listener net.Listener
	// ClientCA signs the one client that the endpoint accepts, whose common name
	// is fairlead-apiserver.
	ClientCA *x509.CertPool
	// Status is what GET /status answers, as JSON; nil for none.
	Status func() any
	// StopPods ends all pods when Run ends, within StopTimeout (by default 10
	// s). Otherwise they go on, and the next run adopts them.
	StopPods    bool
	StopTimeout time.Duration
	// BackOff is the delay before the second restart of a container, doubled
	// for each further one up to 5 min; by default 10 s.
	BackOff time.Duration
	// UIDs are the users for pods that are not allowed to be privileged, by default
	// DefaultUIDRange.
	UIDs UIDRange
	// Hide are directories that such pods do not see, beside StateDir.
	Hide []string
	// PodPIDs bounds the processes of each pod that is not allowed to be privileged,
	// by default DefaultPodPIDs.
	PodPIDs int64
	// Protect keeps the kernel from killing this process when memory is short, where
	// it may.
	Protect bool
	// LogLimit bounds the output kept of each container; zero for 5 files of
	// 10 MiB.
	LogLimit logfile.Limit
	Log      *slog.Logger
}

// Runner runs the Pods of one node.
type Runner struct {
	o    Options
	ipam *ipam
	cert certificate
	rec  *events.Recorder

	objects  *objects
	services corelisters.ServiceLister
	network  *network
	changed  chan struct{} // see Changed
	metrics  *metrics
	cgroups  *cgroups
	memory   int64 // of the machine
	uids     *uids
	oneUser  bool // there is only one user, as without root
	// unmapped is why the range of users cannot be used, nil if it can.
	unmapped error
	units    *systemd.Bus

	mu      sync.Mutex
	workers map[types.UID]*worker
	// registered are the Pods that stand for programs of the machine.
	registered map[types.UID]*registered
	synced     bool // services are known
	running    sync.WaitGroup
	// starts holds one entry for each pod that is being started: starting a
	// process takes a core for a moment, and too many at once time out.
	starts chan struct{}
	// measures holds one entry while a volume is being measured.
	measures chan struct{}
}

// New prepares a Runner: it makes the state directory and, for an endpoint, a
// certificate if there is none yet.
func New(o Options) (*Runner, error) {
	if o.Client == nil || o.NodeName == "" || o.StateDir == "" {
		return nil, errors.New("runner: Client, NodeName and StateDir are required")
	}
	if o.Device == "" {
		o.Device = "fl0"
	}
	if o.ClusterDomain == "" {
		o.ClusterDomain = "cluster.local"
	}
	if o.StopTimeout <= 0 {
		o.StopTimeout = 10 * time.Second
	}
	if o.UIDs == (UIDRange{}) {
		o.UIDs = DefaultUIDRange
	}
	if o.PodPIDs <= 0 {
		o.PodPIDs = DefaultPodPIDs
	}
	if o.BackOff <= 0 {
		o.BackOff = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(o.StateDir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	o.StateDir = dir
	if err := os.MkdirAll(filepath.Join(dir, "pods"), 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if o.ShimCommand == nil {
		o.ShimCommand = shimCommand(dir, o.Log)
	}
	r := &Runner{
		o: o, ipam: newIPAM(), workers: map[types.UID]*worker{}, registered: map[types.UID]*registered{},
		units: systemd.NewBus(o.Log), starts: make(chan struct{}, 2*runtime.NumCPU()),
		measures: make(chan struct{}, 1), changed: make(chan struct{}, 1), metrics: newMetrics(),
		cgroups: openCgroups(dir), memory: memoryCapacity(),
	}
	r.oneUser = confine.OneUser()
	if !r.oneUser && !confine.Mapped(o.UIDs.First, o.UIDs.Last) {
		r.unmapped = fmt.Errorf("--pod-uid-range %s is not within the users of the agent's own user namespace (/proc/self/uid_map)", o.UIDs)
		o.Log.Warn("cannot start Pods that are not allowed to be privileged", "err", r.unmapped)
	}
	if r.uids, err = loadUIDs(o.UIDs, dir); err != nil {
		return nil, err
	}
	// What this machine does not allow stands in the Node's conditions as well, and a
	// Pod with limits gets an Event: a start of every day is no reason to warn.
	if o.Protect {
		if err := process.SetOOMScoreAdj(os.Getpid(), protectedScore); err != nil {
			r.cgroups.unprotected = err
			o.Log.Info("cannot protect the agent when memory is short", "err", err)
		}
	}
	if r.cgroups.err != nil {
		o.Log.Info("cannot enforce limits of Pods", "err", r.cgroups.err)
	}
	r.network = newNetwork(r)
	if o.Listener != nil {
		if o.ClientCA == nil {
			return nil, errors.New("runner: the endpoint needs ClientCA")
		}
		if r.cert, err = loadCertificate(dir, o.NodeName); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Fingerprint is the SHA-256 of the endpoint's certificate in DER form, in
// hexadecimal; empty without a Listener. It is published in
// svc.ServingCertAnnotation.
func (r *Runner) Fingerprint() string { return r.cert.fingerprint }

// Healthy returns why this node cannot run pods now, nil if it can.
func (r *Runner) Healthy() error { return r.network.healthy() }

// Condition returns the Node condition PodsRouted.
func (r *Runner) Condition() corev1.NodeCondition { return r.network.condition() }

// Limits returns the Node condition PodsLimited.
func (r *Runner) Limits() corev1.NodeCondition { return r.cgroups.condition() }

// Confinement returns the Node condition PodsConfined.
func (r *Runner) Confinement() corev1.NodeCondition { return r.confinement() }

// Changed holds a token when what Healthy or Condition return may have changed.
func (r *Runner) Changed() <-chan struct{} { return r.changed }

// notify leaves a token for the receiver of Changed.
func (r *Runner) notify() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// WaitReady waits until pods bound to this node are started.
func (r *Runner) WaitReady(ctx context.Context) error {
	select {
	case <-r.network.up:
		return nil
	case <-ctx.Done():
		return errors.Join(ctx.Err(), r.Healthy())
	}
}

// Run runs pods until ctx ends. It returns an error if it cannot begin.
func (r *Runner) Run(ctx context.Context) error {
	lock, err := lockDir(r.o.StateDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	r.rec = events.NewRecorder(r.o.Client, corev1.EventSource{Component: "fairlead-runner", Host: r.o.NodeName}, r.o.Log)
	defer r.rec.Start()()
	if err := r.loadLastAddresses(); err != nil {
		r.o.Log.Warn("cannot read the last addresses of pods; they may be reused early", "err", err)
	}
	// Workers outlive ctx for as long as StopPods needs.
	workCtx, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	r.objects = newObjects(workCtx, r.o.Client)
	defer r.objects.running.Wait()
	defer r.running.Wait()
	defer stopWork()
	if err := r.adopt(workCtx); err != nil {
		return err
	}
	infCtx, stopInformers := context.WithCancel(ctx)
	var others sync.WaitGroup
	others.Go(func() { r.follow(infCtx, workCtx) })
	others.Go(func() { r.network.run(infCtx) })
	others.Go(func() { r.units.Run(infCtx) })
	if r.o.Listener != nil {
		others.Go(func() { r.serve(infCtx) })
	}
	<-ctx.Done()
	r.stopRegistered()
	if r.o.StopPods {
		r.stopAll()
	}
	stopInformers()
	others.Wait()
	return nil
}

// stopAll ends all pods in parallel and removes the network.
func (r *Runner) stopAll() {
	r.mu.Lock()
	all := make([]*worker, 0, len(r.workers))
	for _, w := range r.workers {
		all = append(all, w)
	}
	r.mu.Unlock()
	for _, w := range all {
		w.stop()
	}
	ended := make(chan struct{})
	go func() { // ends with the workers, for which Run waits too
		r.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(r.o.StopTimeout + 20*time.Second):
		r.o.Log.Error("some pods did not end in time")
	}
	if err := r.network.remove(); err != nil {
		r.o.Log.Error("cannot remove the pods' network", "err", err)
	}
}

// ErrRunning is the error where an agent uses the state directory.
var ErrRunning = errors.New("in use by another fairlead agent")

// lockDir locks the state directory against a second agent.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := fileio.Lock(f); err != nil {
		_ = f.Close()
		if errors.Is(err, fileio.ErrLocked) {
			err = ErrRunning
		}
		return nil, fmt.Errorf("%s is %w: stop that one or choose another directory", dir, err)
	}
	return f, nil
}

func (r *Runner) podDir(uid types.UID) string {
	return filepath.Join(r.o.StateDir, "pods", string(uid))
}

// adopt makes a worker for every pod of an earlier run and takes over the shims
// that still run. The objects of the pods come later.
func (r *Runner) adopt(ctx context.Context) error {
	dirs, err := podDirs(filepath.Join(r.o.StateDir, "pods"))
	if err != nil {
		return err
	}
	devices, err := link.Devices()
	if err != nil {
		return err
	}
	known := map[types.UID]bool{}
	for _, d := range dirs {
		rec, err := readPod(d)
		if err != nil || r.podDir(rec.UID) != d.dir {
			r.o.Log.Warn("cannot read the record of a pod; ending the pod", "dir", d.dir, "err", err)
			if err := endShim(ctx, d.dir); err != nil {
				r.o.Log.Error("cannot end the shim of a pod without a record", "dir", d.dir, "err", err)
				continue
			}
			if err := removePod(d); err != nil {
				r.o.Log.Error("cannot remove the state of a pod without a record", "dir", d.dir, "err", err)
			}
			continue // sweep removes its control group
		}
		known[rec.UID] = true
		w := newWorker(ctx, r, rec.UID, rec.Namespace, rec.Name)
		w.rec = rec
		r.ipam.reserve(rec.IPs)
		shimCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
		id, err := shim.Client{Dir: d.dir}.Process(shimCtx)
		cancel()
		switch {
		case err != nil:
			w.killRemains()
		case !netns.SameUser(id.Pid):
			// A namespace of 'fairlead up' that was killed: its network is gone,
			// and this process has no rights there to give the pod another one.
			w.log.Info("a pod of an earlier run is in another user namespace; starting it again", "shim", id.Pid)
			if err := endShim(ctx, d.dir); err != nil {
				w.log.Error("cannot end the pod of an earlier run", "err", err)
			}
			w.killRemains()
		default:
			w.adoptShim(id)
			w.relink = rec.Device != "" && !slices.Contains(devices, rec.Device)
			w.log.Info("adopted a running pod", "shim", id.Pid)
		}
		r.start(w)
	}
	if err := r.cgroups.sweep(ctx, func(uid types.UID) bool { return known[uid] }); err != nil {
		r.o.Log.Error("cannot remove control groups of earlier pods", "err", err)
	}
	return nil
}

func endShim(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	return shim.Client{Dir: dir}.Shutdown(ctx)
}

// start runs w until it is done.
func (r *Runner) start(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers[w.uid] = w
	r.running.Go(func() {
		w.run()
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.workers, w.uid)
		r.metrics.forget(w.rec.Namespace, w.rec.Name, string(w.uid))
	})
}

// nudgeAll has every Pod take its next step.
func (r *Runner) nudgeAll() {
	r.each((*worker).nudge)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.registered {
		g.nudge()
	}
}

// each calls f with every worker.
func (r *Runner) each(f func(*worker)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.workers {
		f(w)
	}
}

// canStart reports whether what a new pod needs is known: the Services, so that
// none is missing in its environment (behaviour 71), and the node's ranges.
func (r *Runner) canStart(pod *corev1.Pod) bool {
	r.mu.Lock()
	synced := r.synced
	r.mu.Unlock()
	return synced && (r.network.ready() || pod.Spec.HostNetwork && len(r.hostIPs()) > 0)
}

func (r *Runner) hostIPs() []netip.Addr { return r.network.hostIPs() }

// serviceVars returns the Service variables of a pod that starts now.
func (r *Runner) serviceVars(pod *corev1.Pod) []corev1.EnvVar {
	var list []*corev1.Service
	own, err := r.services.Services(pod.Namespace).List(everything)
	if err == nil {
		list = own
	}
	if pod.Namespace != corev1.NamespaceDefault {
		if api, err := r.services.Services(corev1.NamespaceDefault).Get("kubernetes"); err == nil {
			list = append(list, api)
		}
	}
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	return env.For(pod.Namespace, list, links)
}

func (r *Runner) event(pod *corev1.Pod, kind, reason, message string) {
	r.rec.Event(pod, kind, reason, message)
}

// writeEtc writes the files that are mounted over the machine's in a pod.
func (r *Runner) writeEtc(p podPaths, pod *corev1.Pod, ips []netip.Addr) error {
	if len(r.o.ClusterDNS) == 0 && !pod.Spec.HostNetwork && (pod.Spec.DNSPolicy == corev1.DNSClusterFirst || pod.Spec.DNSPolicy == "") {
		r.event(pod, corev1.EventTypeWarning, "MissingClusterDNS", "no cluster DNS address is known: the pod gets the machine's resolv.conf")
	}
	files := map[string]string{
		"resolv.conf": resolvConf(pod, r.o.ClusterDNS, r.o.ClusterDomain, machineResolver()),
		"hosts":       hostsFile(pod, ips, r.o.ClusterDomain),
		"hostname":    hostnameOf(pod) + "\n",
	}
	for name, text := range files {
		// Readable for any user a container runs as, with any umask.
		if err := errors.Join(os.WriteFile(p.etc(name), []byte(text), 0o644), os.Chmod(p.etc(name), 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// machineResolver returns the machine's resolv.conf, or systemd-resolved's file of
// the real servers if it names only its stub on the loopback device, which a pod
// cannot reach. What --configure-resolver added is no part of it.
func machineResolver() string {
	const real = "/run/systemd/resolve/resolv.conf"
	b, err := os.ReadFile(resolvconf.Original(resolvconf.Path))
	if err != nil {
		return ""
	}
	for _, s := range parseResolver(string(b)).servers {
		if a, err := netip.ParseAddr(s); err == nil && !a.IsLoopback() {
			return string(b)
		}
	}
	if better, err := os.ReadFile(real); err == nil {
		return string(better)
	}
	return string(b)
}

// saveLastAddresses records the last addresses given to pods.
func (r *Runner) saveLastAddresses() {
	b, err := json.Marshal(r.ipam.lastAddresses())
	if err == nil {
		err = fileio.Replace(r.addressesFile(), b, 0o600)
	}
	if err != nil {
		r.o.Log.Warn("cannot record the last addresses of pods; they may be reused early after a restart", "err", err)
	}
}

func (r *Runner) loadLastAddresses() error {
	b, err := os.ReadFile(r.addressesFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	last := map[netip.Prefix]netip.Addr{}
	if err == nil {
		err = json.Unmarshal(b, &last)
	}
	if err == nil {
		r.ipam.setLastAddresses(last)
	}
	return err
}

func (r *Runner) addressesFile() string { return filepath.Join(r.o.StateDir, "addresses.json") }
