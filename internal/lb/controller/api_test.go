package controller

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// rig is a real API server and clients for the test itself.
type rig struct {
	testing.TB
	config *rest.Config // of an administrator
	own    *rest.Config // of the controller, with its own rights
	client kubernetes.Interface
	lb     *v1.Client
}

func newRig(t testing.TB) *rig {
	t.Helper()
	server := apiservertest.StartServer(t)
	config := rest.CopyConfig(server.LoopbackConfig())
	config.QPS = -1
	client, err := v1.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{TB: t, config: config, own: server.ControllersConfig(), client: kubernetes.NewForConfigOrDie(config), lb: client}
}

func flagPool(t testing.TB, name, ranges string) FlagPool {
	t.Helper()
	list, err := pool.ParseList(ranges)
	if err != nil {
		t.Fatal(err)
	}
	return FlagPool{Name: name, Ranges: list}
}

// run starts a controller and returns it with what stops it; it stops at the end of the test
// anyway. run returns when it works.
func (r *rig) run(change func(*Options)) (c *Controller, stop func()) {
	r.Helper()
	started := make(chan struct{})
	o := Options{Config: r.own, Default: true, Started: sync.OnceFunc(func() { close(started) })}
	if os.Getenv("FAIRLEAD_TEST_LOG") != "" {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if change != nil {
		change(&o)
	}
	c, err := New(o)
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				r.Errorf("Run: %v", err)
			}
		case <-time.After(30 * time.Second):
			r.Errorf("Run does not return")
		}
	})
	r.Cleanup(stop)
	select {
	case <-started:
	case err := <-done:
		r.Fatalf("Run returned early: %v", err)
	case <-time.After(60 * time.Second):
		r.Fatal("the controller does not start")
	}
	return c, stop
}

// withPools starts a controller with pools of flags.
func (r *rig) withPools(ranges ...string) (stop func()) {
	r.Helper()
	_, stop = r.run(func(o *Options) { o.Pools = r.flagPools(ranges...) })
	return stop
}

// flagPools returns pools named a, b and so on.
func (r *rig) flagPools(ranges ...string) []FlagPool {
	r.Helper()
	var out []FlagPool
	for i, text := range ranges {
		out = append(out, flagPool(r, string(rune('a'+i)), text))
	}
	return out
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// eventually polls until f is content.
func (r *rig) eventually(what string, f func() error) {
	r.Helper()
	deadline := time.Now().Add(40 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			r.Fatalf("%s: still: %v", what, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// service makes a Service of type LoadBalancer.
func (r *rig) service(name string, change ...func(*corev1.Service)) *corev1.Service {
	r.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{}}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80}}
	for _, f := range change {
		f(s)
	}
	made, err := r.client.CoreV1().Services(s.Namespace).Create(context.Background(), s, metav1.CreateOptions{})
	r.must(err)
	return made
}

func annotate(pairs ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		for i := 0; i < len(pairs); i += 2 {
			s.Annotations[pairs[i]] = pairs[i+1]
		}
	}
}

func (r *rig) get(name string) *corev1.Service {
	r.Helper()
	s, err := r.client.CoreV1().Services("default").Get(context.Background(), name, metav1.GetOptions{})
	r.must(err)
	return s
}

// change updates a Service, whoever else does so.
func (r *rig) change(name string, f func(*corev1.Service)) {
	r.Helper()
	for {
		s := r.get(name)
		f(s)
		_, err := r.client.CoreV1().Services("default").Update(context.Background(), s, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			r.must(err)
			return
		}
	}
}

func (r *rig) delete(name string) {
	r.Helper()
	r.must(r.client.CoreV1().Services("default").Delete(context.Background(), name, metav1.DeleteOptions{}))
}

// published returns the addresses of a Service's status.
func published(s *corev1.Service) string {
	var out []string
	for _, ing := range s.Status.LoadBalancer.Ingress {
		out = append(out, ing.IP+ing.Hostname)
	}
	return strings.Join(out, " ")
}

// wants waits until a Service has these addresses in its status and claims for
// them, and no others.
func (r *rig) wants(name, want string) {
	r.Helper()
	r.eventually("addresses of "+name, func() error {
		s := r.get(name)
		if got := published(s); got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		for _, ing := range s.Status.LoadBalancer.Ingress {
			if ing.IPMode == nil || *ing.IPMode != corev1.LoadBalancerIPModeVIP || len(ing.Ports) > 0 {
				return fmt.Errorf("%+v", ing)
			}
		}
		if has := slices.Contains(s.Finalizers, finalizer); want != "" && !has {
			return fmt.Errorf("finalizers are %q", s.Finalizers)
		}
		var claimed []string
		for addr, services := range r.claims() {
			if slices.Contains(strings.Split(services, ","), "default/"+name) {
				claimed = append(claimed, addr)
			}
		}
		fields := strings.Fields(want)
		slices.Sort(claimed)
		slices.Sort(fields)
		if !slices.Equal(claimed, fields) {
			return fmt.Errorf("claims are %q, want %q", claimed, fields)
		}
		return nil
	})
}

// claims returns who has which address.
func (r *rig) claims() map[string]string {
	r.Helper()
	list, err := r.client.NetworkingV1().IPAddresses().List(context.Background(),
		metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + svc.AddressManager})
	r.must(err)
	out := map[string]string{}
	for _, o := range list.Items {
		out[o.Name] = o.Annotations[svc.ClaimServicesAnnotation]
	}
	return out
}

func (r *rig) wantClaims(want map[string]string) {
	r.Helper()
	r.eventually("claims", func() error {
		if got := r.claims(); fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

// wantEvent waits for an Event about an object with a reason and part of its message.
func (r *rig) wantEvent(object, reason, message string) {
	r.Helper()
	r.eventually("Event "+reason+" about "+object, func() error {
		list, err := r.client.CoreV1().Events("default").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var all []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != object {
				continue
			}
			if e.Reason == reason && strings.Contains(e.Message, message) {
				return nil
			}
			all = append(all, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("want %q; there are %q", message, all)
	})
}

// setStatus writes a Service's status as another controller would.
func (r *rig) setStatus(name, ingress string) {
	r.Helper()
	_, err := r.client.CoreV1().Services("default").Patch(context.Background(), name, types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":`+ingress+`}}}`), metav1.PatchOptions{}, "status")
	r.must(err)
}

// makePool makes an IPAddressPool.
func (r *rig) makePool(name string, spec v1.IPAddressPoolSpec) {
	r.Helper()
	p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
	_, err := r.lb.Pools.Create(context.Background(), p, metav1.CreateOptions{})
	r.must(err)
}

// wantPool waits until the status of a pool is as want finds it.
func (r *rig) wantPool(name string, want func(*v1.IPAddressPool) bool) {
	r.Helper()
	r.eventually("pool "+name, func() error {
		p, err := r.lb.Pools.Get(context.Background(), name, metav1.GetOptions{})
		if err == nil && !want(p) {
			err = fmt.Errorf("it is %+v, %+v", p.Spec, p.Status)
		}
		return err
	})
}
