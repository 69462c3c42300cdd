package service

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/svc"
)

// history notices an address or port that two Services have at one time. A
// Service has what it was given from the answer to its creation to the request
// of its deletion.
type history struct {
	mu    sync.Mutex
	owner map[string]string
	bad   []string
}

func (h *history) created(s *corev1.Service) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range allocated(s) {
		if o, ok := h.owner[k]; ok {
			h.bad = append(h.bad, fmt.Sprintf("%s belongs to %s and %s", k, o, s.Name))
		}
		h.owner[k] = s.Name
	}
}

func (h *history) deleting(s *corev1.Service) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range allocated(s) {
		delete(h.owner, k)
	}
}

func allocated(s *corev1.Service) []string {
	out := slices.Clone(s.Spec.ClusterIPs)
	for n := range allocator.NodePorts(s) {
		out = append(out, strconv.Itoa(int(n)))
	}
	return out
}

// behaviour 160: two servers, 64 clients that create and delete, ranges so small
// that they collide all the time; no address or port twice, none lost.
func TestTwoServersNeverShare(t *testing.T) {
	const clients = 64
	endpoint := startEtcd(t)
	small := func(o *Options) { o.NodePorts.Last = o.NodePorts.First + 4*clients - 1 }
	servers := []*server{startServer(t, endpoint, small), startServer(t, endpoint, small)}
	h := &history{owner: map[string]string{}}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	var made atomic.Int64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				s := servers[(c+i)%2]
				out, err := s.create(service(fmt.Sprintf("s-%d-%d", c, i), ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) {
					s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyPreferDualStack)
				}))
				if err != nil {
					t.Errorf("client %d: %v", c, err)
					return
				}
				made.Add(1)
				h.created(out)
				if ctx.Err() != nil {
					return // the last one stays
				}
				h.deleting(out)
				servers[rand.N(2)].delete(out.Name)
			}
		})
	}
	wg.Wait()
	if len(h.bad) > 0 {
		t.Fatalf("after %d creations: %v", made.Load(), h.bad)
	}
	t.Logf("%d creations by %d clients on 2 servers", made.Load(), clients)

	// What is claimed is exactly what the Services have.
	var want []string
	for k, o := range h.owner {
		want = append(want, k+"=default/"+o)
	}
	servers[0].wantClaims(want...)
	if found, err := servers[0].Repair(context.Background(), 0); err != nil || len(found) > 0 {
		t.Errorf("the repair found %v, %v", found, err)
	}
}

// A repair reads claims from a cache that is behind the store. What a Service
// released a moment ago is nothing that the repair found.
func TestRepairBesideDeletions(t *testing.T) {
	s := start(t)
	for i := range 100 {
		out := s.mustCreate(service(fmt.Sprintf("s-%d", i), ofType(corev1.ServiceTypeNodePort)))
		s.delete(out.Name)
		if found, err := s.Repair(context.Background(), 0); err != nil || len(found) > 0 {
			t.Fatalf("repair %d found %v, %v", i, found, err)
		}
	}
	s.wantClaims()
}

// A creation costs the same whatever is there already. Reported are creations
// a second; compare within one run only.
func BenchmarkCreate(b *testing.B) {
	endpoint := startEtcd(b)
	s := startServer(b, endpoint)
	have := 0
	for _, existing := range []int{200, 5000} {
		fill(b, s, &have, existing)
		for _, clients := range []int{1, 16, 64} {
			b.Run(fmt.Sprintf("existing=%d/clients=%d", existing, clients), func(b *testing.B) {
				var n atomic.Int64
				names := make([][]string, clients)
				run := rand.Uint32()
				b.ResetTimer()
				var wg sync.WaitGroup
				for c := range clients {
					wg.Go(func() {
						for i := n.Add(1); i <= int64(b.N); i = n.Add(1) {
							name := fmt.Sprintf("b-%x-%d", run, i)
							if _, err := s.create(service(name)); err != nil {
								b.Error(err)
								return
							}
							names[c] = append(names[c], name)
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
				for _, list := range names {
					for _, name := range list {
						if _, _, err := s.Service.Delete(ctxIn("default"), name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}

// fill creates Services until there are n.
func fill(b *testing.B, s *server, have *int, n int) {
	b.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 32 {
		wg.Go(func() {
			for i := range next {
				if _, err := s.create(service(fmt.Sprintf("fill-%d", i))); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for ; *have < n; *have++ {
		next <- *have
	}
	close(next)
	wg.Wait()
}

// BenchmarkPlainCreate is what BenchmarkCreate is to be compared with: one write
// of a small object, where a Service takes two.
func BenchmarkPlainCreate(b *testing.B) {
	s := startServer(b, startEtcd(b))
	owner := svc.Name{Namespace: "default", Name: "x"}
	for _, clients := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			var n atomic.Int64
			run := rand.Uint32()
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					for i := n.Add(1); i <= int64(b.N); i = n.Add(1) {
						if err := s.claimPort(fmt.Sprintf("p-%x-%d", run, i), owner); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
		})
	}
}
