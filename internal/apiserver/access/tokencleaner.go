package access

import (
	"context"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// tokenSweep is the time between two looks for join tokens that have ended; they are
// not valid before it either.
const tokenSweep = time.Minute

// DeleteEndedTokens deletes the Secrets of join tokens that have ended, as
// kube-controller-manager does, until ctx ends.
func DeleteEndedTokens(ctx context.Context, client kubernetes.Interface, log *slog.Logger) {
	sweep := time.NewTicker(tokenSweep)
	defer sweep.Stop()
	for {
		if err := sweepTokens(ctx, client, time.Now()); err != nil && ctx.Err() == nil {
			log.Warn("cannot delete join tokens that have ended; retrying", "err", err, "after", tokenSweep)
		}
		select {
		case <-ctx.Done():
			return
		case <-sweep.C:
		}
	}
}

func sweepTokens(ctx context.Context, client kubernetes.Interface, now time.Time) error {
	secrets := client.CoreV1().Secrets(join.SecretNamespace)
	list, err := secrets.List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("type", string(join.SecretType)).String()})
	if err != nil {
		return err
	}
	for i := range list.Items {
		s := &list.Items[i]
		if l, err := join.List(s); err != nil || !l.Expired(now) {
			continue // not a join token, or still valid
		}
		// Its expiration may have changed since the list.
		same := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion}}
		if err := secrets.Delete(ctx, s.Name, same); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}
