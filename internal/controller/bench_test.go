package controller

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// childEnv names the file with the connection of a child process that only runs
// controllers, so that their CPU and memory can be told from the API server's.
const childEnv = "FAIRLEAD_TEST_CONTROLLERS"

// connection is what a child needs to know.
type connection struct {
	Host, Token, ServerName string
	CA, Cert, Key           []byte
}

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		raw, err := os.ReadFile(path)
		c := connection{}
		if err == nil {
			err = json.Unmarshal(raw, &c)
		}
		config := &rest.Config{Host: c.Host, BearerToken: c.Token, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA, CertData: c.Cert,
			KeyData: c.Key, ServerName: c.ServerName}}
		if err == nil {
			err = Run(context.Background(), Options{Config: config, Controllers: []string{EndpointsName, EndpointSliceName, MirroringName},
				Started: func() { fmt.Println("started") }})
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// child starts the controllers in their own process and returns its pid.
func (r *rig) child() int {
	r.Helper()
	tls := r.config.TLSClientConfig
	raw, err := json.Marshal(connection{r.config.Host, r.config.BearerToken, tls.ServerName, tls.CAData, tls.CertData, tls.KeyData})
	r.must(err)
	path := r.TempDir() + "/config.json"
	r.must(os.WriteFile(path, raw, 0o600))
	self, err := os.Executable()
	r.must(err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	r.must(err)
	r.must(cmd.Start())
	r.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "started\n" {
		r.Fatalf("child: %q, %v", line, err)
	}
	return cmd.Process.Pid
}

// cpu returns the processor time that a process has used, and its resident memory
// in MiB.
func (r *rig) cpu(pid int) (time.Duration, int) {
	r.Helper()
	s, err := process.ReadStat(pid)
	r.must(err)
	return s.CPU, s.Resident >> 20
}

// fill makes services, each with some ready Pods, in one namespace.
func (r *rig) fill(ns string, services, pods int) {
	r.Helper()
	r.node("n0")
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < services; i += 8 {
				name := fmt.Sprintf("s%d", i)
				r.service(ns, name)
				for j := range pods {
					n := i*pods + j
					r.pod(ns, fmt.Sprintf("p%d-%d", i, j), name, "n0", fmt.Sprintf("10.%d.%d.%d", 100+n>>16, n>>8&255, n&255))
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkPodToSlice measures, at 1,000 Services with one Pod each in one
// namespace, the time from writing a Pod's readiness to the slice that says so
// being seen by a watcher, and the controllers' CPU for it (endpoints and
// endpointslice together).
func BenchmarkPodToSlice(b *testing.B) {
	r := newRig(b)
	ns, ctx := r.namespace("bench"), context.Background()
	r.fill(ns, 1000, 1)
	began := time.Now()
	pid := r.child()
	r.within(2*time.Minute, "all slices", func() error {
		list, err := r.client.DiscoveryV1().EndpointSlices(ns).List(ctx, metav1.ListOptions{})
		r.must(err)
		if len(list.Items) < 1000 {
			return fmt.Errorf("%d slices", len(list.Items))
		}
		return nil
	})
	b.Logf("1,000 services from a cold start: %s", time.Since(began).Round(time.Millisecond))
	w, err := r.client.DiscoveryV1().EndpointSlices(ns).Watch(ctx, metav1.ListOptions{})
	r.must(err)
	defer w.Stop()
	var took []time.Duration
	before, _ := r.cpu(pid)
	for i := 0; b.Loop(); i++ {
		name := fmt.Sprintf("p%d-0", i%1000)
		pod, err := r.client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		r.must(err)
		ready := pod.Status.Conditions[0].Status != corev1.ConditionTrue
		pod.Status = runningStatus(pod.Status.PodIP, ready)
		at := time.Now()
		_, err = r.client.CoreV1().Pods(ns).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
		r.must(err)
		await(b, w, name, ready)
		took = append(took, time.Since(at))
	}
	after, resident := r.cpu(pid)
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64((after-before).Microseconds())/1000/float64(len(took)), "cpu-ms/op")
	b.ReportMetric(float64(resident), "rss-MiB")
}

func await(b *testing.B, w watch.Interface, pod string, ready bool) {
	b.Helper()
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				b.Fatal("the watch ended")
			}
			s, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			for _, x := range s.Endpoints {
				if x.TargetRef.Name == pod && *x.Conditions.Ready == ready {
					return
				}
			}
		case <-time.After(10 * time.Second):
			b.Fatalf("no slice says that %s is ready: %v", pod, ready)
		}
	}
}

// BenchmarkRollingRestart replaces 5,000 ready Pods behind one Service, eight at
// a time, and reports the controllers' CPU for all of it.
func BenchmarkRollingRestart(b *testing.B) {
	r := newRig(b)
	ns := r.namespace("bench")
	const n = 5000
	r.fill(ns, 1, n)
	pid := r.child()
	r.within(time.Minute, "all endpoints", func() error { return r.total(ns, n) })
	for b.Loop() {
		before, _ := r.cpu(pid)
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for j := w; j < n; j += 8 {
					r.killPod(ns, fmt.Sprintf("p0-%d", j))
					r.pod(ns, fmt.Sprintf("p0-%d", j), "s0", "n0", fmt.Sprintf("10.%d.%d.%d", 100, j>>8&255, j&255))
				}
			})
		}
		wg.Wait()
		r.within(time.Minute, "all endpoints", func() error { return r.total(ns, n) })
		after, resident := r.cpu(pid)
		b.ReportMetric((after - before).Seconds(), "cpu-s/op")
		b.ReportMetric(float64(resident), "rss-MiB")
	}
}

func (r *rig) total(ns string, want int) error {
	r.Helper()
	ready := 0
	for _, s := range r.slices(ns, "s0") {
		for _, e := range s.Endpoints {
			if *e.Conditions.Ready {
				ready++
			}
		}
	}
	if ready != want {
		return fmt.Errorf("%d ready endpoints, want %d", ready, want)
	}
	return nil
}
