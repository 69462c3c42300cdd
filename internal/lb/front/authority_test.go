package front

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// A Service whose Pods are to be verified is served once there is something to verify them by, and goes on with that while the
// object is wrong.
func TestAuthorities(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	log := slog.New(slog.DiscardHandler)
	f := New(Options{NodeName: "n1", Log: log, Client: r.client, Events: events.NewRecorder(r.client, corev1.EventSource{}, log)})

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	r.must(err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	r.must(err)
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	core := r.client.CoreV1()
	services := map[svc.Name]*service{}
	for _, kind := range []string{"secret", "configmap"} {
		v := &service{object: r.service(kind), listed: true}
		v.spec = &dialect.Spec{BackendTLS: dialect.BackendTLS{Authority: kind + "/ca"}}
		services[svc.Name{Namespace: "default", Name: kind}] = v
		f.services[svc.Name{Namespace: "default", Name: kind}] = v
	}
	f.followAuthorities(ctx, &running)
	await := func(served bool, problem string) {
		t.Helper()
		r.eventually(problem, func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			for n, v := range services {
				v.failure = ""
				s := build(f, n, v)
				if s != nil {
					v.failure = f.inputsLocked(time.Now()).authorityProblem(n, v)
				}
				named := strings.Replace(problem, "%s", v.spec.BackendTLS.Authority, 1)
				if (s != nil && s.PodRoots != nil) != served || v.failure != named {
					return fmt.Errorf("%s: served %t, %q", n.Name, s != nil, v.failure)
				}
			}
			return nil
		})
	}
	await(false, "cannot verify Pods by %s: it does not exist")
	meta := metav1.ObjectMeta{Name: "ca"}
	secret := &corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"ca.crt": text}}
	_, err = core.Secrets("default").Create(ctx, secret, metav1.CreateOptions{})
	r.must(err)
	_, err = core.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"ca.crt": string(text)}},
		metav1.CreateOptions{})
	r.must(err)
	await(true, "")
	_, err = core.Secrets("default").Update(ctx, &corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"ca.crt": []byte("x")}},
		metav1.UpdateOptions{})
	r.must(err)
	_, err = core.ConfigMaps("default").Update(ctx, &corev1.ConfigMap{ObjectMeta: meta}, metav1.UpdateOptions{})
	r.must(err)
	await(true, "cannot verify Pods by %s: its entry ca.crt has no certificate; its last certificates remain in use")
}
