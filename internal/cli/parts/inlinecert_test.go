package parts

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

// A certificate inside of a kubeconfig is warned of when a third of its life is left,
// and not before; one in a file never.
func TestInlineCertificatesAreWarnedOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "proxy"},
			NotBefore: time.Now(), NotAfter: time.Now().Add(90 * 24 * time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		cfg := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CertData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			WarnOfInlineCertificate(ctx, slog.New(slog.NewTextHandler(&log, nil)), cfg)
		}()
		warnings := func() int { synctest.Wait(); return strings.Count(log.String(), "client-certificate") }
		time.Sleep(59 * 24 * time.Hour)
		if n := warnings(); n != 0 {
			t.Errorf("%d warnings a month before the end", n)
		}
		time.Sleep(2 * 24 * time.Hour)
		if n := warnings(); n < 1 || n > 3 || !strings.Contains(log.String(), "user=proxy") {
			t.Errorf("%d warnings when a third is left:\n%s", n, log.String())
		}
		cancel()
		<-done
		log.Reset()
		WarnOfInlineCertificate(t.Context(), slog.New(slog.NewTextHandler(&log, nil)),
			&rest.Config{TLSClientConfig: rest.TLSClientConfig{CertFile: "client.crt"}})
		if log.Len() > 0 {
			t.Errorf("of a file: %s", log.String())
		}
	})
}
