package values

import (
	"context"
	"errors"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// TokenMountPath is where clients of the API look for their token.
const TokenMountPath = "/var/run/secrets/kubernetes.io/serviceaccount"

// Times of tokens. A token is renewed when a fifth of its life is left, and at
// least every day.
const (
	tokenTimeout = 10 * time.Second
	TokenRetry   = 10 * time.Second
	tokenMaxAge  = 24 * time.Hour
)

// Tokens are the ServiceAccount tokens of one pod. They end with the Pod and
// are only kept in memory and in the Pod's volumes. Only the Pod's worker uses them.
type Tokens struct {
	have    map[tokenKey]podToken
	RetryAt time.Time
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

// Get returns a token that is fresh.
func (t *Tokens) Get(
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

// Due returns when a volume's tokens have to be renewed, zero if it has none. A token of an earlier run of the agent
// is unknown, and so due.
func (t *Tokens) Due(v *corev1.Volume) (at time.Time) {
	if v.Projected == nil {
		return time.Time{}
	}
	for _, s := range v.Projected.Sources {
		if s.ServiceAccountToken == nil {
			continue
		}
		renew := t.have[keyOf(s.ServiceAccountToken)].refresh
		if renew.IsZero() {
			renew = time.Unix(1, 0)
		}
		if at.IsZero() || renew.Before(at) {
			at = renew
		}
	}
	return at
}
