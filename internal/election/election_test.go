package election

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A server that was killed and started again takes its Lease at once; the Lease
// of a process that runs, or of another machine, is left alone.
func TestLeaseOfADeadProcess(t *testing.T) {
	self, err := thisProcess()
	if err != nil {
		t.Fatal(err)
	}
	if self.isDead(self.String()) || self.isDead("other_"+self.boot+".1.1") || self.isDead("x") ||
		self.isDead(self.host+"_"+self.boot+".x.y") {
		t.Error("a process is taken for dead that is not known to be")
	}
	dead := self
	dead.id.Start = 1
	if !self.isDead(dead.String()) {
		t.Errorf("%s counts as running", dead)
	}
	client := kubernetes.NewForConfigOrDie(process.API(t))
	holder, seconds, now := dead.String(), int32(15), metav1.NewMicroTime(time.Now())
	_, err = client.CoordinationV1().Leases("kube-system").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "work"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now, AcquireTime: &now},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l := Lease{Client: client, Namespace: "kube-system", Name: "work", Log: slog.New(slog.DiscardHandler)}
	err = l.Run(ctx, func(context.Context) error {
		cancel()
		return nil
	})
	if took := time.Since(before); took > 13*time.Second || err != nil { // the dead one's Lease is for 15 s
		t.Errorf("it took %s: %v", took, err)
	}
}

// cut is a transport that can be cut off.
type cut struct {
	next http.RoundTripper
	off  atomic.Bool
}

func (c *cut) RoundTrip(req *http.Request) (*http.Response, error) {
	if c.off.Load() {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}
	return c.next.RoundTrip(req)
}

// A leader whose Lease cannot be renewed stops, and its writes are held back, before the next
// one begins; the next one begins within 5 s. One that ends makes room at once.
func TestNeverTwoLeaders(t *testing.T) {
	cfg := process.API(t)
	type candidate struct {
		Lease
		cut    cut
		writes kubernetes.Interface
		began  chan context.Context
		waits  chan struct{} // closed when another one leads
		stop   context.CancelFunc
	}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	start := func(name string) *candidate {
		c := &candidate{Lease: Lease{Namespace: "kube-system", Name: "one", Identity: name, Log: slog.New(slog.DiscardHandler)}}
		c.began, c.waits = make(chan context.Context, 1), make(chan struct{})
		c.Waiting = sync.OnceFunc(func() { close(c.waits) })
		own := rest.CopyConfig(cfg)
		own.Wrap(func(next http.RoundTripper) http.RoundTripper { c.cut.next = next; return &c.cut })
		c.Client = kubernetes.NewForConfigOrDie(own)
		fenced := rest.CopyConfig(cfg)
		c.Fence(fenced)
		c.writes = kubernetes.NewForConfigOrDie(fenced)
		var ctx context.Context
		ctx, c.stop = context.WithCancel(t.Context())
		t.Cleanup(c.stop)
		running.Go(func() {
			_ = c.Run(ctx, func(ctx context.Context) error {
				c.began <- ctx
				<-ctx.Done()
				return nil
			})
		})
		return c
	}
	write := func(c *candidate) error {
		_, err := c.writes.CoreV1().ConfigMaps("default").Create(t.Context(),
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "by-" + c.Identity + "-"}}, metav1.CreateOptions{})
		return err
	}
	first := start("first")
	leads := testbed.Receive(t, "the first to lead", first.began)
	if err := write(first); err != nil {
		t.Errorf("the leader cannot write: %v", err)
	}
	second := start("second")
	testbed.Receive(t, "the second to wait", second.waits)
	if err := write(second); !errors.Is(err, errNotLeader) {
		t.Errorf("one that does not lead: %v", err)
	}
	first.cut.off.Store(true)
	since := time.Now()
	next := testbed.Receive(t, "the second to lead", second.began)
	t.Logf("the next leader began after %s", time.Since(since).Round(10*time.Millisecond))
	if leads.Err() == nil {
		t.Error("two lead at once")
	}
	if err := write(first); !errors.Is(err, errNotLeader) {
		t.Errorf("the leader of before: %v", err)
	}
	if err := write(second); err != nil {
		t.Errorf("the new leader cannot write: %v", err)
	}
	first.cut.off.Store(false)
	second.stop()
	testbed.Receive(t, "the end of what the second does", next.Done())
	since = time.Now()
	testbed.Receive(t, "the first to lead again", first.began)
	if took := time.Since(since); took > DefaultTimes().Lease {
		t.Errorf("a Lease that was released was taken after %s", took)
	}
}

// kube-controller-manager's Lease goes from client-go's election to this one and back: neither works while the other
// holds it, and each takes over when the other stops.
func TestHandOverWithKubernetes(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(process.API(t))
	const name, fairlead, other = "kube-controller-manager", "fairlead", "upstream"
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	upstream := func() (began chan struct{}, sees chan string, stop func()) {
		began, sees = make(chan struct{}, 1), make(chan string, 8)
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		config := leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name},
				Client:    client.CoordinationV1(), LockConfig: resourcelock.ResourceLockConfig{Identity: other},
			},
			LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 500 * time.Millisecond, ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) { began <- struct{}{} }, OnStoppedLeading: func() {},
				OnNewLeader: func(who string) { sees <- who },
			},
		}
		running.Go(func() { leaderelection.RunOrDie(ctx, config) })
		return began, sees, cancel
	}
	began, _, stopUpstream := upstream()
	testbed.Receive(t, "client-go's election to lead", began)
	leads, waits := make(chan struct{}, 1), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	l := &Lease{Client: client, Namespace: "kube-system", Name: name, Identity: fairlead, Log: slog.New(slog.DiscardHandler)}
	l.Times, l.Waiting = Times{15 * time.Second, 10 * time.Second, time.Second}, sync.OnceFunc(func() { close(waits) })
	running.Go(func() {
		_ = l.Run(ctx, func(ctx context.Context) error {
			leads <- struct{}{}
			<-ctx.Done()
			return nil
		})
	})
	testbed.Receive(t, "fairlead to wait", waits)
	if len(leads) > 0 {
		t.Error("fairlead leads beside client-go's election")
	}
	stopUpstream()
	testbed.Receive(t, "fairlead to lead", leads)
	began, sees, _ := upstream()
	if who := testbed.Receive(t, "client-go's election to see the leader", sees); who != fairlead || len(began) > 0 {
		t.Errorf("it sees %s, or leads beside it (%d)", who, len(began))
	}
	lease, err := client.CoordinationV1().Leases("kube-system").Get(t.Context(), name, metav1.GetOptions{})
	if err != nil || *lease.Spec.LeaseDurationSeconds != 15 || *lease.Spec.HolderIdentity != fairlead {
		t.Errorf("the Lease is %+v, %v", lease.Spec, err)
	}
	stop()
	testbed.Receive(t, "client-go's election to lead again", began)
}

// Times with which two could lead at once are refused.
func TestTimes(t *testing.T) {
	if err := DefaultTimes().Check(); err != nil {
		t.Error(err)
	}
	s := time.Second
	for _, c := range []struct {
		times Times
		want  string
	}{
		{Times{15 * s, 10 * s, 2 * s}, ""}, // kube-controller-manager's
		{Times{1500 * time.Millisecond, s, s / 4}, "lease-duration"},
		{Times{0, 0, 0}, "lease-duration"},
		{Times{2 * time.Hour, s, s / 4}, "lease-duration"},
		{Times{4 * s, 4 * s, s}, "renew-deadline"},
		{Times{4 * s, 3 * s, 2500 * time.Millisecond}, "retry-period"},
		{Times{4 * s, 3 * s, 0}, "retry-period"},
		{Times{4 * s, -s, s}, "retry-period"},
	} {
		err := c.times.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v: %v; want %q", c.times, err, c.want)
		}
	}
}

// A short time between renewals does not shorten the time that the API server has for one.
func TestRenewal(t *testing.T) {
	s := time.Second
	for _, c := range []struct {
		times Times
		want  time.Duration
	}{
		{DefaultTimes(), s}, {Times{4 * s, 3 * s, s / 10}, 1450 * time.Millisecond}, {Times{15 * s, 10 * s, 2 * s}, 2 * s},
		{Times{4 * s, 3 * s, 2 * s}, 2 * s}, {Times{60 * s, 40 * s, s / 10}, 2 * s},
	} {
		if got := c.times.renewal(); got != c.want {
			t.Errorf("%v: %s, want %s", c.times, got, c.want)
		}
	}
}
