package controller

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Every annotation has an Event that says what became of it, once for each change.
func TestEventsAboutAnnotations(t *testing.T) {
	t.Parallel()
	const aws = "service.beta.kubernetes.io/aws-load-balancer-"
	r := newRig(t)
	r.withPools("192.0.2.0/28")
	s := r.service("web", annotate(
		aws+"healthcheck-interval", "1", aws+"ssl-port", "443", aws+"proxy-protocol-per-target-group", "80", aws+"extra-security-groups", "sg-1",
		aws+"cross-zone-load-balancing-enabled", "true", "metallb.io/address-pool", "a", "fairlead.dev/lb-tags", "a=\x1b[31mred"))
	want := map[string]string{
		"InvalidAnnotation":      `Warning "1" is not a number from 5 to 300 seconds`,
		"UnknownAnnotation":      "Warning is " + aws + "ssl-ports meant?",
		"AnnotationNotSupported": "Warning the PROXY protocol is for all ports or none",
		"AnnotationIgnored":      "Normal accepted; has no meaning here because",
		"AnnotationApplied":      "Normal metallb.io/address-pool: pool a",
	}
	about := func() (out []corev1.Event) {
		list, err := r.client.CoreV1().Events("default").List(context.Background(), metav1.ListOptions{FieldSelector: "involvedObject.name=web"})
		r.must(err)
		return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return !strings.Contains(e.Reason, "Annotation") })
	}
	r.eventually("Events", func() error {
		for reason, text := range want {
			kind, text, _ := strings.Cut(text, " ")
			if !slices.ContainsFunc(about(), func(e corev1.Event) bool {
				return e.Reason == reason && e.Type == kind && strings.Contains(e.Message, text) && !strings.Contains(e.Message, "\x1b")
			}) {
				return fmt.Errorf("no %s %q", reason, text)
			}
		}
		return nil
	})
	before := len(about())
	_, err := r.client.CoreV1().Services("default").Patch(context.Background(), s.Name, "application/merge-patch+json",
		[]byte(`{"metadata":{"annotations":{"fairlead.dev/lb-drain-tiemout":"5","example.com/other":"x"}}}`), metav1.PatchOptions{})
	r.must(err)
	r.eventually("an Event about what is new", func() error {
		if now := about(); len(now) != before+1 || !slices.ContainsFunc(now, func(e corev1.Event) bool {
			return e.Reason == "UnknownAnnotation" && strings.Contains(e.Message, "is fairlead.dev/lb-drain-timeout meant?") &&
				!strings.Contains(e.Message, "ssl-port")
		}) {
			return fmt.Errorf("%d Events, then %d", before, len(now))
		}
		return nil
	})
}

// Events tell the way of a Service and why, and its status has it as ipMode (behaviours 97, 115).
func TestWayOfAService(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/28")
	r.service("web", annotate("fairlead.dev/lb-proxy-protocol", "v2"))
	mode := func(want corev1.LoadBalancerIPMode) {
		t.Helper()
		r.eventually("ipMode "+string(want), func() error {
			in := r.get("web").Status.LoadBalancer.Ingress
			if len(in) != 1 || in[0].IPMode == nil || *in[0].IPMode != want {
				return fmt.Errorf("%v", in)
			}
			return nil
		})
	}
	annotated := func(value *string) {
		t.Helper()
		r.change("web", func(s *corev1.Service) {
			s.Annotations = map[string]string{}
			if value != nil {
				s.Annotations["fairlead.dev/lb-proxy-protocol"] = *value
			}
		})
	}
	mode(corev1.LoadBalancerIPModeProxy)
	r.wantEvent("web", "LoadBalancerWay", "proxied: nodes accept its connections and make others to Pods, because of fairlead.dev/lb-proxy")
	annotated(new("v3")) // a wrong value changes nothing
	r.wantEvent("web", "InvalidAnnotation", `"v3"`)
	mode(corev1.LoadBalancerIPModeProxy)
	annotated(nil)
	mode(corev1.LoadBalancerIPModeVIP)
	r.wantEvent("web", "LoadBalancerWay", "direct: nodes forward its connections to Pods")
	// From the start a mistyped value of what changes the bytes must not make them pass without it.
	r.service("mistyped", annotate("fairlead.dev/lb-proxy-protocol", "v3"))
	r.eventually("ipMode of mistyped", func() error {
		in := r.get("mistyped").Status.LoadBalancer.Ingress
		if len(in) != 1 || *in[0].IPMode != corev1.LoadBalancerIPModeProxy {
			return fmt.Errorf("%v", in)
		}
		return nil
	})
}

// The next leader does not repeat what the one before has said about annotations and addresses.
func TestEventsOfTheNextLeader(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stop := r.withPools("192.0.2.0/28")
	wrong := annotate("fairlead.dev/lb-drain-tiemout", "5", "fairlead.dev/lb-addresses", "198.51.100.1")
	var texts []string
	count := func() (n int32) {
		list, err := r.client.CoreV1().Events("default").List(context.Background(), metav1.ListOptions{FieldSelector: "involvedObject.name=web"})
		r.must(err)
		texts = nil
		for _, e := range list.Items {
			if e.Type == corev1.EventTypeWarning {
				n += e.Count
				texts = append(texts, fmt.Sprint(e.Name, " ", e.Count, " ", e.Reason, " ", e.Message))
			}
		}
		return n
	}
	r.service("web", wrong)
	r.wantEvent("web", "UnknownAnnotation", "lb-drain-timeout")
	r.wantEvent("web", "AddressNotInPool", "198.51.100.1")
	for i := range 2 {
		stop()
		stop = r.withPools("192.0.2.0/28")
		name := fmt.Sprint("later", i) // worked on after the others, and its Event is written after theirs
		r.service(name, wrong)
		r.wantEvent(name, "AddressNotInPool", "198.51.100.1")
		if n := count(); n != 2 {
			t.Fatalf("%d Events after another leader: %q", n, texts)
		}
	}
	r.change("web", func(s *corev1.Service) { s.Annotations["fairlead.dev/lb-drain-tiemout2"] = "5" })
	r.eventually("an Event about another annotation", func() error {
		if n := count(); n != 3 {
			return fmt.Errorf("%d Events", n)
		}
		return nil
	})
}

// Wrong annotations on thousands of Services do not displace all other Events: each has its own, in time.
func TestEventsAboutAnnotationsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const services = 2*events.QuotaSize + 50
		client := fake.NewClientset()
		recorder := events.NewRecorder(client, corev1.EventSource{}, slog.New(slog.DiscardHandler))
		var work *loop.Loop[svc.Name]
		c := &reporter{events: recorder, later: func(n svc.Name, after time.Duration) { work.Queue.AddAfter(n, after) }}
		records := map[svc.Name]*service{}
		work = loop.New(slog.New(slog.DiscardHandler), "", 1, func(_ context.Context, name svc.Name) error {
			s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
				Namespace: name.Namespace, Name: name.Name, Annotations: map[string]string{"fairlead.dev/lb-drain-tiemout": "5"},
			}}
			record := records[name]
			if record == nil {
				record = &service{}
				records[name] = record
			} else { // it has an address now
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
			}
			record.object = s
			c.reading(record, claim.Read(s))
			return nil
		})
		defer c.events.Start()()
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		running.Go(func() { work.Run(ctx) })
		for i := range services {
			work.Queue.Add(svc.Name{Namespace: "default", Name: fmt.Sprint("s", i)})
		}
		for _, want := range []int{events.QuotaSize, 2 * events.QuotaSize, services} {
			synctest.Wait()
			list, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
			if err != nil || len(list.Items) != want {
				t.Errorf("%d Events, want %d, %v", len(list.Items), want, err)
			}
			time.Sleep(events.QuotaPeriod) // of the bubble's clock
		}
	})
}

func TestCombinedEventsAreBounded(t *testing.T) {
	var texts []string
	for range 200 {
		texts = append(texts, strings.Repeat("é", 60))
	}
	out := combine(append(texts, strings.Repeat("é", 5000)))
	if len(out) != maxEventsAlike || !strings.HasSuffix(out[2], "see 'fairlead lb explain'") {
		t.Errorf("%d messages", len(out))
	}
	for _, m := range append(out, combine([]string{strings.Repeat("é", 5000)})...) {
		if len(m) > 1100 {
			t.Errorf("a message of %d bytes", len(m))
		}
	}
}
