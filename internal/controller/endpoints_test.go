package controller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

var endpointControllers = []string{EndpointsName, EndpointSliceName, MirroringName}

// behaviours 17 to 19, 22, 153: what stands behind a Service follows its Pods, and
// goes with it.
func TestEndpointsFollowPods(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: endpointControllers})
	ns := r.namespace("shop")
	r.node("n0")
	r.service(ns, "web")
	r.eventually("the empty slice", func() error {
		if got := r.slices(ns, "web"); len(got) == 0 || len(got[0].Endpoints) != 0 {
			return fmt.Errorf("%d slices", len(got))
		}
		return nil
	})
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.pod(ns, "b", "web", "n0", "10.244.0.2")
	r.pod(ns, "x", "other", "n0", "10.244.0.3")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true", "10.244.0.2:9376 true")
	r.wantSubsets(ns, "web", "10.244.0.1 10.244.0.2|")
	r.flip(ns, "a", false)
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 false", "10.244.0.2:9376 true")
	r.wantSubsets(ns, "web", "10.244.0.2|10.244.0.1")
	s := r.slices(ns, "web")[0]
	if s.Labels[discoveryv1.LabelManagedBy] != epslice.ManagedBySelector || s.OwnerReferences[0].Name != "web" ||
		*s.Endpoints[0].Zone != "z-n0" {
		t.Errorf("labels %v, owners %v", s.Labels, s.OwnerReferences)
	}
	r.killPod(ns, "a")
	r.wantEndpoints(ns, "web", "10.244.0.2:9376 true")
	r.killPod(ns, "b")
	r.wantEndpoints(ns, "web")
	r.pod(ns, "c", "web", "n0", "10.244.0.4")
	r.wantEndpoints(ns, "web", "10.244.0.4:9376 true")
	r.must(r.client.CoreV1().Services(ns).Delete(context.Background(), "web", metav1.DeleteOptions{}))
	r.eventually("slices and Endpoints go with the Service", func() error {
		if got := r.slices(ns, "web"); len(got) != 0 {
			return fmt.Errorf("%d slices", len(got))
		}
		if _, err := r.client.CoreV1().Endpoints(ns).Get(context.Background(), "web", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("endpoints: %v", err)
		}
		return nil
	})
}

// A Pod's weight is that of the slice that it is in; a change of it alone moves it there.
func TestWeightOfAPod(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: endpointControllers})
	ns := r.namespace("shop")
	r.node("n0")
	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.pod(ns, "b", "web", "n0", "10.244.0.2")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true", "10.244.0.2:9376 true")
	for _, weight := range []string{"3", "0", "1", "many"} {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, svc.WeightAnnotation, weight)
		_, err := r.client.CoreV1().Pods(ns).Patch(context.Background(), "b", types.MergePatchType, patch, metav1.PatchOptions{})
		r.must(err)
		want := map[string]string{"3": "3", "0": "0"}[weight]
		r.eventually("weight "+weight, func() error {
			for _, s := range r.slices(ns, "web") {
				for _, e := range s.Endpoints {
					if got := s.Annotations[svc.WeightAnnotation]; e.TargetRef.Name == "b" && got != want || e.TargetRef.Name == "a" && got != "" {
						return fmt.Errorf("%s is in a slice of weight %q", e.TargetRef.Name, got)
					}
				}
			}
			return nil
		})
		r.wantEndpoints(ns, "web", "10.244.0.1:9376 true", "10.244.0.2:9376 true")
	}
	r.eventually("an Event", func() error {
		list, err := r.client.CoreV1().Events(ns).List(context.Background(), metav1.ListOptions{})
		if err == nil && !slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.Reason == "InvalidWeight" && strings.Contains(e.Message, "is not a number from 0 to 256, and counts as 1: b")
		}) {
			return fmt.Errorf("%d others", len(list.Items))
		}
		return err
	})
}

func (r *rig) wantSubsets(namespace, name, want string) {
	r.Helper()
	r.eventually("Endpoints "+name, func() error {
		e, err := r.client.CoreV1().Endpoints(namespace).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var ready, not []string
		for _, s := range e.Subsets {
			for _, a := range s.Addresses {
				ready = append(ready, a.IP)
			}
			for _, a := range s.NotReadyAddresses {
				not = append(not, a.IP)
			}
		}
		if got := strings.Join(ready, " ") + "|" + strings.Join(not, " "); got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

// behaviours 21 to 23: Endpoints made by a user are mirrored, and left alone
// otherwise; a selector taken away leaves what it made.
func TestUserMadeEndpoints(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: endpointControllers})
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	r.service(ns, "db", func(s *corev1.Service) { s.Spec.Selector = nil })
	e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Subsets: []corev1.EndpointSubset{{
		Addresses: []corev1.EndpointAddress{{IP: "192.0.2.42"}}, Ports: []corev1.EndpointPort{{Name: "http", Port: 9376}},
	}}}
	e, err := r.client.CoreV1().Endpoints(ns).Create(ctx, e, metav1.CreateOptions{})
	r.must(err)
	r.wantEndpoints(ns, "db", "192.0.2.42:9376 true")
	e.Subsets[0].Addresses[0].IP = "192.0.2.43"
	_, err = r.client.CoreV1().Endpoints(ns).Update(ctx, e, metav1.UpdateOptions{})
	r.must(err)
	r.wantEndpoints(ns, "db", "192.0.2.43:9376 true")
	if by := r.slices(ns, "db")[0].Labels[discoveryv1.LabelManagedBy]; by != epslice.ManagedByMirroring {
		t.Errorf("managed by %q", by)
	}
	r.must(r.client.CoreV1().Endpoints(ns).Delete(ctx, "db", metav1.DeleteOptions{}))
	r.eventually("the mirror goes", func() error {
		if got := r.slices(ns, "db"); len(got) != 0 {
			return fmt.Errorf("%d slices", len(got))
		}
		return nil
	})

	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantSubsets(ns, "web", "10.244.0.1|")
	s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
	r.must(err)
	s.Spec.Selector = nil
	_, err = r.client.CoreV1().Services(ns).Update(ctx, s, metav1.UpdateOptions{})
	r.must(err)
	// Services and Pods come by their own watches: who knows this later Service
	// knows that web has no selector any more.
	r.service(ns, "web2", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
	r.wantSubsets(ns, "web2", "10.244.0.1|")
	r.pod(ns, "b", "web", "n0", "10.244.0.2")
	r.wantSubsets(ns, "web2", "10.244.0.1 10.244.0.2|") // by now web would have changed too
	r.wantSubsets(ns, "web", "10.244.0.1|")
}

// Objects without an owner, left by an earlier run, go; Endpoints that
// a user made without a Service stay.
func TestLeftoversOfAnEarlierRun(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	stop := r.run(Options{Controllers: endpointControllers})
	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true")
	r.wantSubsets(ns, "web", "10.244.0.1|")
	stop()
	r.must(r.client.CoreV1().Services(ns).Delete(ctx, "web", metav1.DeleteOptions{}))
	_, err := r.client.CoreV1().Endpoints(ns).Create(ctx, &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "mine"}},
		metav1.CreateOptions{})
	r.must(err)
	// The record of a leader election, as old clients keep it.
	lock := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Name: "lock", Labels: map[string]string{epslice.LabelEndpointsManagedBy: epslice.EndpointsManagedBy},
		Annotations: map[string]string{"control-plane.alpha.kubernetes.io/leader": "{}"},
	}}
	_, err = r.client.CoreV1().Endpoints(ns).Create(ctx, lock, metav1.CreateOptions{})
	r.must(err)
	r.run(Options{Controllers: endpointControllers})
	r.eventually("leftovers go", func() error {
		if got := r.slices(ns, "web"); len(got) != 0 {
			return fmt.Errorf("%d slices", len(got))
		}
		if _, err := r.client.CoreV1().Endpoints(ns).Get(ctx, "web", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("endpoints: %v", err)
		}
		return nil
	})
	for _, name := range []string{"mine", "lock"} {
		if _, err := r.client.CoreV1().Endpoints(ns).Get(ctx, name, metav1.GetOptions{}); err != nil {
			t.Errorf("Endpoints of another client: %v", err)
		}
	}
}

// churn changes Pods and Services at random.
func churn(r *rig, ns string, steps int) {
	r.Helper()
	ctx := context.Background()
	pods := map[string]bool{}
	list, err := r.client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
	r.must(err)
	for i := range list.Items {
		pods[list.Items[i].Name] = true
	}
	for i := range steps {
		name := fmt.Sprintf("p%d", rand.IntN(12))
		app := fmt.Sprintf("s%d", rand.IntN(3))
		switch {
		case !pods[name]:
			r.ips++
			r.pod(ns, name, app, "n0", fmt.Sprintf("10.244.%d.%d", r.ips/250, r.ips%250+1))
			pods[name] = true
		case rand.IntN(4) == 0:
			r.killPod(ns, name)
			delete(pods, name)
		default:
			r.flip(ns, name, rand.IntN(2) == 0)
		}
		if rand.IntN(10) == 0 {
			s, err := r.client.CoreV1().Services(ns).Get(ctx, app, metav1.GetOptions{})
			r.must(err)
			s.Labels = map[string]string{"v": fmt.Sprint(i)}
			_, err = r.client.CoreV1().Services(ns).Update(ctx, s, metav1.UpdateOptions{})
			r.must(err)
		}
	}
}

// wantRight checks the slices and Endpoints of all Services against the Pods.
func wantRight(r *rig, ns string, limit int) {
	r.Helper()
	ctx := context.Background()
	r.eventually("everything right", func() error {
		pods, err := r.client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		services, err := r.client.CoreV1().Services(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range services.Items {
			s := &services.Items[i]
			var want []string
			var selected []*corev1.Pod
			for j := range pods.Items {
				if p := &pods.Items[j]; p.Labels["app"] == s.Spec.Selector["app"] {
					want = append(want, fmt.Sprintf("%s:9376 %v", p.Status.PodIP, epslice.Ready(p)))
					selected = append(selected, p)
				}
			}
			slices.Sort(want)
			if got := r.endpointsOf(ns, s.Name); !slices.Equal(got, want) {
				return fmt.Errorf("%s: slices have %q, want %q", s.Name, got, want)
			}
			for _, sl := range r.slices(ns, s.Name) {
				if sl.Labels["v"] != s.Labels["v"] || len(sl.Endpoints) > limit {
					return fmt.Errorf("%s: labels %v, %d endpoints", sl.Name, sl.Labels, len(sl.Endpoints))
				}
			}
			e, err := r.client.CoreV1().Endpoints(ns).Get(ctx, s.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if epslice.Endpoints(s, selected, e, time.Time{}) != nil {
				return fmt.Errorf("%s: Endpoints are not right", s.Name)
			}
		}
		return nil
	})
}

// One request in ten fails, some after they were carried out: the end state is
// the same. So it is when the controllers are stopped and started in the middle,
// and when two of them work by mistake.
func TestConvergesWhateverFails(t *testing.T) {
	for name, mishap := range map[string]func(r *rig, ns string, o Options){
		"faults": func(r *rig, ns string, o Options) {
			config, healthy := r.faulty()
			o.Config = config
			r.run(o)
			churn(r, ns, 120)
			healthy()
		},
		"faults to the end": func(r *rig, ns string, o Options) {
			o.Config, _ = r.faulty()
			r.run(o)
			churn(r, ns, 120)
		},
		"restarts": func(r *rig, ns string, o Options) {
			for range 4 {
				stop := r.run(o)
				churn(r, ns, 30)
				stop()
			}
			r.run(o)
		},
		"two at once": func(r *rig, ns string, o Options) {
			r.run(o)
			r.run(o)
			churn(r, ns, 120)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			ns := r.namespace("shop")
			r.node("n0")
			for i := range 3 {
				r.service(ns, fmt.Sprintf("s%d", i))
			}
			twice := r.watchForDuplicates(ns)
			mishap(r, ns, Options{Controllers: endpointControllers, MaxEndpointsPerSlice: 3})
			wantRight(r, ns, 3)
			if seen := twice(); len(seen) > 0 && name != "two at once" {
				t.Errorf("a watcher saw twice: %q", seen)
			}
		})
	}
}

// watchForDuplicates follows the slices as a client does. The returned function
// ends that and returns the addresses that were in two slices of a Service at
// a time.
func (r *rig) watchForDuplicates(ns string) func() []string {
	r.Helper()
	w, err := r.client.DiscoveryV1().EndpointSlices(ns).Watch(context.Background(), metav1.ListOptions{})
	r.must(err)
	done := make(chan []string, 1)
	go func() {
		var twice []string
		where := map[string]map[string]bool{} // "service address" → slices
		has := map[string][]string{}          // slice → its keys
		for e := range w.ResultChan() {
			s, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			for _, k := range has[s.Name] {
				delete(where[k], s.Name)
			}
			delete(has, s.Name)
			if e.Type == watch.Deleted {
				continue
			}
			for _, x := range s.Endpoints {
				k := s.Labels[discoveryv1.LabelServiceName] + " " + x.Addresses[0]
				if where[k] == nil {
					where[k] = map[string]bool{}
				}
				where[k][s.Name] = true
				has[s.Name] = append(has[s.Name], k)
				if len(where[k]) > 1 {
					twice = append(twice, k)
				}
			}
		}
		done <- twice
	}()
	return func() []string {
		w.Stop()
		return <-done
	}
}
