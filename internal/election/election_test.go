package election

import (
	"context"
	"log/slog"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A server that was killed and started again takes its Lease at once; the Lease
// of a process that runs, or of another machine, is left alone.
func TestLeaseOfADeadProcess(t *testing.T) {
	self, err := thisProcess()
	if err != nil {
		t.Fatal(err)
	}
	if self.isDead(self.String()) || self.isDead("other_"+self.boot+".1.1") || self.isDead("x") ||
		self.isDead(self.host+"_"+self.boot+".x.y") {
		t.Error("a process is taken for dead that is not known to be")
	}
	dead := self
	dead.id.Start = 1
	if !self.isDead(dead.String()) {
		t.Errorf("%s counts as running", dead)
	}
	client := kubernetes.NewForConfigOrDie(apiservertest.Start(t))
	holder, seconds, now := dead.String(), int32(15), metav1.NewMicroTime(time.Now())
	_, err = client.CoordinationV1().Leases("kube-system").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "work"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now, AcquireTime: &now},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l := Lease{Client: client, Namespace: "kube-system", Name: "work", Log: slog.New(slog.DiscardHandler)}
	err = l.Run(ctx, func(context.Context) error {
		cancel()
		return nil
	})
	if took := time.Since(before); took > 13*time.Second || err != nil {
		t.Errorf("it took %s: %v", took, err)
	}
}
