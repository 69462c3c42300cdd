package servers

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The full run is 60 s on three members:
//
//	go test ./test/servers -v -args -duration 60s -members 3
var (
	duration = flag.Duration("duration", 8*time.Second, "how long Services are created and deleted")
	members  = flag.Int("members", 1, "members of the etcd cluster")
	seed     = flag.Uint64("seed", uint64(time.Now().UnixNano()), "decides which server is killed when, and what clients do")
)

const (
	serverCount = 3
	clientCount = 64
	// The ranges are so small that they run full now and then.
	addressRange, addressCount = "10.96.7.0/25", 126
	portRange, portCount       = "30000-30063", 64
)

func TestMain(m *testing.M) {
	flag.Parse()
	process.Main(func() int { return testbed.Run(m) }, "fairlead", "backend")
}

// TestServersThatAreKilled: behaviours 65, 86, 161 to 163. Every write that any of
// the servers made is replayed: no address or node port ever has two Services,
// and when all is quiet again every one of them can be allocated.
func TestServersThatAreKilled(t *testing.T) {
	t.Logf("seed %d", *seed)
	etcd := startStore(t, *members)
	h, watched := watch(t, etcd)
	var servers []*process.Server
	for range serverCount {
		servers = append(servers, newServer(t, etcd, "--service-cluster-ip-range", addressRange, "--service-node-port-range", portRange))
	}
	// The first makes what all need; then the others.
	for _, s := range servers {
		s.Start(t)
		s.AwaitReady(t)
	}
	l := load{servers: servers, acknowledged: map[string][]string{}}
	kills := l.run(t)
	left := claimsWithoutService(t, etcd)
	for _, s := range servers {
		s.Start(t)
	}
	for _, s := range servers {
		s.AwaitReady(t)
	}
	c := servers[0].Client
	cleanUp(t, c)
	awaitClaims(t, etcd, c)
	fill(t, servers)

	watched()
	for _, b := range h.broken {
		t.Error(b)
	}
	for name, got := range l.acknowledged {
		if _, ok := h.stored["default/"+name]; !ok {
			t.Errorf("the creation of %s was answered with %v and is not in the history", name, got)
		}
	}
	if len(l.acknowledged) == 0 || kills == 0 || l.failed.Load() == 0 {
		t.Errorf("nothing was tried: %d Services, %d kills, %d failed requests", len(l.acknowledged), kills, l.failed.Load())
	}
	t.Logf("%d claims were left behind", left)
	t.Logf("%d kills, %d Services created, %d in the store at some time, %d requests refused or failed, %d writes checked",
		kills, len(l.acknowledged), h.services, l.failed.Load(), h.writes)
}

// watch follows the store from its first write on; done waits until it has
// seen everything and stops it.
func watch(t *testing.T, etcd *store) (_ *history, done func()) {
	h := newHistory()
	ctx, cancel := context.WithCancel(t.Context())
	var seen atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for r := range etcd.client.Watch(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithRev(1), clientv3.WithProgressNotify()) {
			for _, e := range r.Events {
				value := e.Kv.Value
				if e.Type == clientv3.EventTypeDelete {
					value = nil
				}
				if err := h.add(e.Kv.ModRevision, string(e.Kv.Key), value); err != nil {
					t.Error(err)
				}
			}
			if err := r.Err(); err != nil && ctx.Err() == nil {
				t.Errorf("the history has a gap: %v", err)
			}
			seen.Store(r.Header.Revision)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return h, func() {
		r, err := etcd.client.Put(ctx, "/registry/end", "")
		if err != nil {
			t.Fatal(err)
		}
		testbed.Until(t, "the whole history", func() error {
			if n := seen.Load(); n < r.Header.Revision {
				return fmt.Errorf("at revision %d of %d", n, r.Header.Revision)
			}
			return nil
		})
		cancel()
		wg.Wait()
	}
}

// load is what clients do.
type load struct {
	servers []*process.Server
	failed  atomic.Int64

	mu sync.Mutex
	// acknowledged are the Services whose creation was answered, and with what.
	acknowledged map[string][]string
}

// run lets clients work and kills servers, and returns how often.
func (l *load) run(t *testing.T) (kills int) {
	ctx, cancel := context.WithTimeout(t.Context(), *duration)
	defer cancel()
	var wg sync.WaitGroup
	// The clients outlive the kills by a little: at the last one they are busy.
	busy, enough := context.WithTimeout(t.Context(), *duration+time.Second)
	defer enough()
	for i := range clientCount {
		wg.Go(func() { l.client(busy, i, rand.New(rand.NewPCG(*seed, uint64(i)))) })
	}
	rnd := rand.New(rand.NewPCG(*seed, clientCount))
	for pause(ctx, rnd, 1500*time.Millisecond) {
		s := l.servers[rnd.IntN(len(l.servers))]
		s.Kill()
		kills++
		pause(ctx, rnd, 500*time.Millisecond)
		s.Start(t)
		// Mostly the next comes only when this one works again, so that there is
		// work to be killed in; now and then several are down.
		if rnd.IntN(4) > 0 {
			up, cancel := context.WithTimeout(ctx, 10*time.Second)
			for pause(up, rnd, 40*time.Millisecond) && s.Ready(up) != nil {
				continue
			}
			cancel()
		}
	}
	// All at once, while the clients still wait for answers.
	for _, s := range l.servers {
		s.Kill()
	}
	wg.Wait()
	return kills
}

// pause waits a random time of at most limit and reports whether ctx still runs.
func pause(ctx context.Context, rnd *rand.Rand, limit time.Duration) bool {
	timer := time.NewTimer(time.Duration(rnd.Int64N(int64(limit))))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx.Err() == nil
}

// client creates Services, changes them and deletes them, each through a server
// of its choice.
func (l *load) client(ctx context.Context, id int, rnd *rand.Rand) {
	for n := 0; pause(ctx, rnd, 40*time.Millisecond); n++ {
		s := service(fmt.Sprintf("s%d-%d", id, n), rnd)
		if !l.create(ctx, s, rnd) && rnd.IntN(2) == 0 {
			continue // perhaps it was made all the same; the end deletes it
		}
		pause(ctx, rnd, 60*time.Millisecond)
		if rnd.IntN(3) == 0 {
			kind := []string{"NodePort", "ClusterIP", "LoadBalancer", "ExternalName"}[rnd.IntN(4)]
			patch := fmt.Sprintf(`{"spec":{"type":%q,"externalName":"example.com"}}`, kind)
			_, err := l.any(rnd).Services(metav1.NamespaceDefault).Patch(ctx, s.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			l.count(err)
			pause(ctx, rnd, 20*time.Millisecond)
		}
		l.count(l.any(rnd).Services(metav1.NamespaceDefault).Delete(ctx, s.Name, metav1.DeleteOptions{}))
	}
}

func (l *load) any(rnd *rand.Rand) typedcorev1.CoreV1Interface {
	return l.servers[rnd.IntN(len(l.servers))].Client.CoreV1()
}

func (l *load) count(err error) {
	if err != nil {
		l.failed.Add(1)
	}
}

func (l *load) create(ctx context.Context, s *corev1.Service, rnd *rand.Rand) bool {
	got, err := l.any(rnd).Services(metav1.NamespaceDefault).Create(ctx, s, metav1.CreateOptions{})
	l.count(err)
	if err != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acknowledged[s.Name] = used(got)
	return true
}

// service is one of a random kind. A few ask for addresses and ports that many
// want.
func service(name string, rnd *rand.Rand) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	switch rnd.IntN(10) {
	case 0, 1, 2:
		s.Spec.Type = corev1.ServiceTypeNodePort
	case 3:
		s.Spec.Type = corev1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = int32(30000 + rnd.IntN(4))
	case 4:
		s.Spec.ClusterIP = fmt.Sprintf("10.96.7.%d", 2+rnd.IntN(4))
	case 5:
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	return s
}

// cleanUp deletes every Service of the clients.
func cleanUp(t *testing.T, c kubernetes.Interface) {
	t.Helper()
	testbed.Until(t, "no Service of a client to be left", func() error {
		list, err := c.CoreV1().Services(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var left []error
		for _, s := range list.Items {
			if s.Name == "kubernetes" {
				continue
			}
			left = append(left, fmt.Errorf("%s is there", s.Name))
			err := c.CoreV1().Services(s.Namespace).Delete(t.Context(), s.Name, metav1.DeleteOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				left = append(left, err)
			}
		}
		return errors.Join(left...)
	})
}

// claimsWithoutService counts what is claimed and not used after all servers
// were stopped in the middle of their work.
func claimsWithoutService(t *testing.T, etcd *store) int {
	t.Helper()
	r, err := etcd.client.Get(t.Context(), "/registry/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	h, claimed := newHistory(), 0
	for _, kv := range r.Kvs {
		if err := h.add(kv.ModRevision, string(kv.Key), kv.Value); err != nil {
			t.Fatal(err)
		}
	}
	for what := range h.claims {
		if _, ok := h.held[what]; !ok {
			claimed++
		}
	}
	return claimed
}

// awaitClaims waits until nothing is claimed but what the Services of the
// system use.
func awaitClaims(t *testing.T, etcd *store, c kubernetes.Interface) {
	t.Helper()
	begin := time.Now()
	testbed.Until(t, "the repair to free what the killed servers left", func() error {
		var want, have []string
		list, err := c.CoreV1().Services(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range list.Items {
			want = append(want, used(&s)...)
		}
		for _, prefix := range []string{addressPrefix, portPrefix} {
			r, err := etcd.client.Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
			if err != nil {
				return err
			}
			for _, kv := range r.Kvs {
				have = append(have, strings.TrimPrefix(string(kv.Key), prefix))
			}
		}
		slices.Sort(want)
		slices.Sort(have)
		if !slices.Equal(want, have) {
			return fmt.Errorf("claimed %v, used %v", have, want)
		}
		return nil
	})
	t.Logf("nothing is left claimed %s after the last Service was deleted", time.Since(begin).Round(100*time.Millisecond))
}

// fill allocates every address and every node port, through all servers in
// turn.
func fill(t *testing.T, servers []*process.Server) {
	t.Helper()
	list, err := servers[0].Client.CoreV1().Services(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	addresses := addressCount - len(list.Items)
	for i := range addresses {
		s := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("fill%d", i)},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		}
		if i < portCount {
			s.Spec.Type = corev1.ServiceTypeNodePort
		}
		// A server learns by its watch what the others gave up and took; only
		// until then may it think that the range is full.
		testbed.Until(t, fmt.Sprintf("address %d of %d and, up to %d, a node port", i+1, addresses, portCount), func() error {
			_, err := servers[i%len(servers)].Client.CoreV1().Services(metav1.NamespaceDefault).Create(t.Context(), s, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil // made by a try whose answer was lost
			}
			return err
		})
	}
}
