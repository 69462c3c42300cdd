package parts

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"time"

	"k8s.io/client-go/rest"
)

// maxCertPause is the longest time between two warnings of a certificate's end.
const maxCertPause = 24 * time.Hour

// WarnOfInlineCertificate warns, until ctx ends, when a third of the life of a client
// certificate in a kubeconfig is left. One in a file is read again when it changes;
// one in the kubeconfig itself is not, and this process would get 401 at its end.
func WarnOfInlineCertificate(ctx context.Context, log *slog.Logger, cfg *rest.Config) {
	block, _ := pem.Decode(cfg.CertData)
	if block == nil {
		return
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return // the client has rejected it
	}
	life := leaf.NotAfter.Sub(leaf.NotBefore)
	pause := min(max(life/20, time.Second), maxCertPause)
	for {
		wait := min(time.Until(leaf.NotAfter.Add(-life/3)), maxCertPause)
		if wait <= 0 {
			wait = pause
			log.Warn("the client certificate in the kubeconfig cannot be renewed while this runs, and requests fail after its end: "+
				"put a new one there and restart, or name files there (client-certificate, client-key), which are read again",
				"user", leaf.Subject.CommonName, "expires", leaf.NotAfter)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
