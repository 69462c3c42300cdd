package front

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The Events of a Service say once each why its Secret cannot be read, and nothing of the node's user and
// addresses, which the log has.
func TestEventsOfUnreadableSecrets(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var state atomic.Value
	var failures atomic.Int32
	state.Store("it cannot be read")
	r.client.PrependReactor("*", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
		switch state.Load() {
		case "it cannot be read":
			return true, nil, fmt.Errorf("read tcp 192.0.2.7:%d->192.0.2.1:6443: i/o timeout", 40000+failures.Add(1))
		case "reading it is forbidden":
			return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "web-cert", errors.New("no one may"))
		}
		return false, nil, nil
	})
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	recorder := events.NewRecorder(r.client, corev1.EventSource{Component: "fairlead-lb-speaker"}, log)
	stop := recorder.Start()
	f := New(Options{NodeName: "n1", Log: log, Client: r.client, Events: recorder})
	n := svc.Name{Namespace: "default", Name: "web"}
	v := &service{object: r.service("web"), spec: &dialect.Spec{Certificates: []string{"web-cert"}}, listed: true}
	f.services[n] = v
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	f.followSecrets(ctx, &running)
	var want []string
	for _, why := range []string{"it cannot be read", "reading it is forbidden", "it does not exist"} {
		state.Store(why)
		want = append(want, "1 node n1: cannot use the TLS Secret web-cert: "+why)
		r.eventually(why, func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			build(f, n, v)
			if !strings.HasSuffix(v.failure, why) || failures.Load() < 3 {
				return fmt.Errorf("%q after %d failures", v.failure, failures.Load())
			}
			return nil
		})
	}
	stop()
	list, err := r.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
	r.must(err)
	var got []string
	for _, e := range list.Items {
		got = append(got, fmt.Sprint(e.Count, " ", e.Message))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("Events %q, want %q", got, want)
	}
	cancel()
	running.Wait()
	for _, part := range []string{"192.0.2.7:40001", "no one may"} {
		if strings.Count(text.String(), part) != 1 {
			t.Errorf("the log has %q %d times:\n%s", part, strings.Count(text.String(), part), &text)
		}
	}
}

// A Service has the its own credentials namespace for a bucket, whatever it names, and of no Secret that is for
// something else; what they are is in no Event and no line of the log (behaviours 124, 125).
func TestCredentialsOfAccessLogs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	endpoint, err := logship.ParseEndpoint("https://127.0.0.1:1")
	r.must(err)
	recorder := events.NewRecorder(r.client, corev1.EventSource{Component: "fairlead-lb-speaker"}, log)
	stop := recorder.Start()
	f := New(Options{
		NodeName: "n1", Log: log, AccessLogs: t.TempDir(), UploadLogs: &LogUpload{Endpoint: logship.Endpoint{URL: endpoint}},
		Client: r.client, Events: recorder, Server: proxied.New(proxied.Options{Log: log, Engine: web.Start}),
	})
	spec := &dialect.Spec{AccessLog: dialect.AccessLog{Enabled: true, Bucket: "logs", Secret: dialect.DefaultLogSecret}}
	own, foreign := svc.Name{Namespace: "shop", Name: "web"}, svc.Name{Namespace: "mallory", Name: "web"}
	secret := func(namespace, kind, key string) {
		t.Helper()
		_ = r.client.CoreV1().Secrets(namespace).Delete(t.Context(), dialect.DefaultLogSecret, metav1.DeleteOptions{})
		_, err := r.client.CoreV1().Secrets(namespace).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: dialect.DefaultLogSecret}, Type: corev1.SecretType(kind),
			Data: map[string][]byte{accessKeyEntry: []byte(namespace), secretKeyEntry: []byte(key)},
		}, metav1.CreateOptions{})
		r.must(err)
	}
	for _, n := range []svc.Name{own, foreign} {
		_, err := r.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n.Namespace}},
			metav1.CreateOptions{})
		r.must(err)
		object := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, UID: "u"}}
		f.services[n] = &service{object: object, spec: spec}
	}
	secret("shop", LogSecretType, "SECRET-shop")
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	f.followSecrets(ctx, &running)
	await := func(what string, want map[svc.Name]string, problem string) {
		t.Helper()
		r.eventually(what, func() error {
			got := map[svc.Name]string{}
			all := f.uploads()
			for _, n := range []svc.Name{own, foreign} {
				d, there := all[logship.OwnerOf(n, "u")]
				if !there {
					return fmt.Errorf("what %s had would be used on", n)
				}
				if d != (logship.Destination{}) {
					got[n] = d.Credentials.SecretKey
				}
			}
			if failure := f.services[foreign].logFailure; !maps.Equal(got, want) || !strings.HasSuffix(failure, problem) {
				return fmt.Errorf("%v, %q", got, failure)
			}
			return nil
		})
	}
	await("none of its own", map[svc.Name]string{own: "SECRET-shop"}, "cannot use the Secret lb-access-logs: it does not exist")
	secret("mallory", "Opaque", "SECRET-database")
	await("one that is for something else", map[svc.Name]string{own: "SECRET-shop"}, "it is of type Opaque, not "+LogSecretType)
	secret("mallory", LogSecretType, "SECRET mallory")
	await("a wrong one", map[svc.Name]string{own: "SECRET-shop"}, "its entry secret-access-key is missing, too long, or has blanks")
	secret("mallory", LogSecretType, "SECRET-mallory")
	await("its own", map[svc.Name]string{own: "SECRET-shop", foreign: "SECRET-mallory"}, "")
	r.must(r.client.CoreV1().Secrets("mallory").Delete(t.Context(), dialect.DefaultLogSecret, metav1.DeleteOptions{}))
	await("what was withdrawn", map[svc.Name]string{own: "SECRET-shop"}, "it was deleted")
	stop()
	list, err := r.client.CoreV1().Events("mallory").List(t.Context(), metav1.ListOptions{})
	r.must(err)
	for _, e := range list.Items {
		if e.Reason != "AccessLogsNotStored" || strings.Contains(e.Message, "SECRET") {
			t.Errorf("%s: %s", e.Reason, e.Message)
		}
	}
	cancel()
	running.Wait()
	if len(list.Items) < 4 || strings.Contains(text.String(), "SECRET") {
		t.Errorf("%d Events, log %s", len(list.Items), &text)
	}
}

// A Secret that is written again with the same certificate is no other one: connections to Pods and health checks go on with it.
func TestSameCertificateWrittenAgain(t *testing.T) {
	a := testbed.NewAuthority(t)
	secret := func(serial int64) *corev1.Secret {
		leaf, key := a.Issue("web.example.com", serial, false)
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return &corev1.Secret{Type: corev1.SecretTypeTLS, Data: map[string][]byte{
			corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}),
			corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		}}
	}
	s, first := &namedSecret{}, secret(2)
	s.setTLS(first)
	was := s.cert
	s.setTLS(first.DeepCopy())
	if s.cert != was || was == nil || s.problem != "" {
		t.Errorf("the certificate is another one after the same Secret: %q", s.problem)
	}
	s.setTLS(&corev1.Secret{})
	if s.cert != was || s.problem == "" {
		t.Error("the last certificate does not go on")
	}
	if s.setTLS(secret(3)); s.cert == was || s.problem != "" {
		t.Errorf("the certificate of another Secret is not used: %q", s.problem)
	}
}
