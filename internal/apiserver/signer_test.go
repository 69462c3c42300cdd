package apiserver_test

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/apiserver/access"
)

// A request stays for a day while it is pending, and for an hour after it was decided, however long it was pending.
func TestOldRequests(t *testing.T) {
	now := time.Now()
	for _, x := range []struct {
		made, decided time.Duration // before now; none for 0
		old           bool
	}{
		{23 * time.Hour, 0, false},
		{25 * time.Hour, 0, true},
		{2 * time.Hour, 2 * time.Hour, true},
		{23 * time.Hour, time.Minute, false},
		{23 * time.Hour, 61 * time.Minute, true},
	} {
		c := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-x.made))}}
		if x.decided > 0 {
			c.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
				{Type: certificatesv1.CertificateDenied, LastUpdateTime: metav1.NewTime(now.Add(-x.decided))}}
		}
		if got := access.Outdated(c, now); got != x.old {
			t.Errorf("made %s ago, decided %s ago: old is %v", x.made, x.decided, got)
		}
	}
}
