package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// tokenMountPath is where clients of the API look for their token.
const tokenMountPath = "/var/run/secrets/kubernetes.io/serviceaccount"

// Times of tokens. A token is renewed when a fifth of its life is left, and at
// least every day.
const (
	tokenTimeout = 10 * time.Second
	tokenRetry   = 10 * time.Second
	tokenMaxAge  = 24 * time.Hour
)

// tokens are the ServiceAccount tokens of one pod. They end with the pod and
// are kept in memory and in the pod's volumes alone. Only the pod's worker uses
// them.
type tokens struct {
	have    map[tokenKey]podToken
	retryAt time.Time
}

type tokenKey struct {
	audience string
	seconds  int64
}

type podToken struct {
	text    string
	refresh time.Time
}

func keyOf(p *corev1.ServiceAccountTokenProjection) tokenKey {
	k := tokenKey{audience: p.Audience, seconds: 3600}
	if p.ExpirationSeconds != nil {
		k.seconds = *p.ExpirationSeconds
	}
	return k
}

// get returns a token that is fresh.
func (t *tokens) get(
	ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, p *corev1.ServiceAccountTokenProjection,
) (string, error) {
	key := keyOf(p)
	if k, ok := t.have[key]; ok && time.Now().Before(k.refresh) {
		return k.text, nil
	}
	account := pod.Spec.ServiceAccountName
	if account == "" {
		return "", errors.New("the pod has no service account, and so no token")
	}
	ctx, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &key.seconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if key.audience != "" {
		r.Spec.Audiences = []string{key.audience}
	}
	asked := time.Now()
	r, err := client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, r, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of service account %s: %w", account, err)
	}
	if t.have == nil {
		t.have = map[tokenKey]podToken{}
	}
	t.have[key] = podToken{r.Status.Token, refreshTime(asked, r.Status.ExpirationTimestamp.Time)}
	return r.Status.Token, nil
}

// refreshTime returns when to replace a token that was requested at asked, by this
// machine's clock, and expires at end, by the server's.
func refreshTime(asked, end time.Time) time.Time {
	life := end.Sub(asked)
	return asked.Add(min(life-life/5, tokenMaxAge))
}

// refresh renews the tokens that are due, and returns when to call it again; zero
// for never.
func (w *worker) refresh(ctx context.Context, pod *corev1.Pod) (next time.Time) {
	now := time.Now()
	if now.Before(w.tokens.retryAt) {
		return w.tokens.retryAt
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Projected == nil {
			continue
		}
		due := time.Time{}
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken != nil {
				// A token of an earlier run of the agent is unknown, and so due.
				due = earlier(due, later(w.tokens.have[keyOf(s.ServiceAccountToken)].refresh, time.Unix(1, 0)))
			}
		}
		if due.IsZero() {
			continue
		}
		if _, err := os.Stat(w.paths.volume(v.Name)); err != nil {
			continue // no container with this volume has started
		}
		if now.Before(due) {
			next = earlier(next, due)
			continue
		}
		f := facts{pod: pod, ips: w.state(pod).ips, hostIPs: w.r.hostIPs()}
		from := source{client: w.r.o.Client, namespace: pod.Namespace, tokens: &w.tokens}
		if err := w.rewrite(ctx, f, v, from); err != nil {
			if ctx.Err() == nil {
				w.log.Warn("cannot renew the pod's token; retrying", "err", err, "after", tokenRetry)
			}
			w.tokens.retryAt = now.Add(tokenRetry)
			return w.tokens.retryAt
		}
		// The next call finds out when it is due again.
		next = now
	}
	return next
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
