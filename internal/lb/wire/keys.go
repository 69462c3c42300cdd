package wire

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
)

// readKeys returns the keys of the speakers' messages: first the entry claim.KeyEntry, which signs, then the other entries,
// with which other speakers may sign while the key is being replaced.
func readKeys(ctx context.Context, client kubernetes.Interface) (keys [][]byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	secret, err := client.CoreV1().Secrets(svc.SystemNamespace).Get(ctx, svc.SpeakerKeySecret, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(secret.Data)) {
		switch key := secret.Data[name]; {
		case name == claim.KeyEntry && len(key) < claim.KeyBytes:
			return nil, fmt.Errorf("its entry %s has fewer than %d bytes", claim.KeyEntry, claim.KeyBytes)
		case name == claim.KeyEntry:
			keys = slices.Insert(keys, 0, key)
		case len(key) >= claim.KeyBytes:
			keys = append(keys, key)
		}
	}
	if len(secret.Data[claim.KeyEntry]) == 0 {
		return nil, fmt.Errorf("it has no entry %s", claim.KeyEntry)
	}
	return keys[:min(len(keys), maxKeys)], nil
}

const (
	// readTimeout bounds one call of the API server, which may be down without an end of the connection.
	readTimeout = 5 * time.Second
	// keyPeriod is how often the Secret is read again.
	keyPeriod = time.Minute
	// maxKeys bounds the keys with which a message is compared.
	maxKeys = 4
)

// FollowKeys uses the keys of the Secret, read every minute, until ctx ends. Without the Secret, the keys stay.
func (t *Conn) FollowKeys(ctx context.Context, client kubernetes.Interface) {
	tick := time.NewTicker(keyPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			t.refreshKeys(ctx, client)
		}
	}
}

func (t *Conn) refreshKeys(ctx context.Context, client kubernetes.Interface) {
	keys, err := readKeys(ctx, client)
	if err != nil || slices.EqualFunc(keys, *t.keys.Load(), slices.Equal) {
		return
	}
	t.keys.Store(&keys)
	t.log.Info("the keys of the speakers have changed", "keys", len(keys))
}

// FirstKeys waits for the Secret with the speakers' keys, which the controller makes.
func FirstKeys(ctx context.Context, client kubernetes.Interface, log *slog.Logger) ([][]byte, error) {
	warned, pause := false, 100*time.Millisecond
	for begin := time.Now(); ; pause = min(2*pause, 2*time.Second) {
		keys, err := readKeys(ctx, client)
		switch {
		case err == nil:
			return keys, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		soon := apierrors.IsNotFound(err) && time.Since(begin) < 5*time.Second // the controller may have just begun, too
		if !warned && !soon {
			warned = true
			log.Warn("cannot read the key of the speakers; retrying", "secret", svc.SystemNamespace+"/"+svc.SpeakerKeySecret, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}
