package accounts

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4/jwt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	apiserviceaccount "k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/registry/serviceaccount"
)

// lookupTimeout bounds the look-up of what a token is bound to.
const lookupTimeout = 10 * time.Second

// clockSkew is how far the clock of the server that issued a token may be ahead.
const clockSkew = time.Minute

// deletionLeeway is how long the token of an object that is being deleted is still
// accepted, as in Kubernetes: its processes may need it to shut down.
const deletionLeeway = time.Minute

// PodUID returns the UID and the deletion timestamp of a Pod, "" if it is not known.
type PodUID func(namespace, name string) (uid string, deleted *metav1.Time)

// Authenticator authenticates the tokens of an Issuer.
type Authenticator struct {
	Issuer   *Issuer
	Accounts corelisters.ServiceAccountLister
	Pods     PodUID
	// Client looks up what the caches lack.
	Client kubernetes.Interface
	Now    func() time.Time
}

var _ authenticator.Token = (*Authenticator)(nil)

// AuthenticateToken has no opinion on tokens of other issuers.
func (a *Authenticator) AuthenticateToken(ctx context.Context, text string) (*authenticator.Response, bool, error) {
	if !a.mine(text) {
		return nil, false, nil
	}
	token, err := jwt.ParseSigned(text, algorithms)
	if err != nil {
		return nil, false, nil //nolint:nilerr // not a token of this kind
	}
	var public jwt.Claims
	var own private
	err = errors.New("no key")
	for _, key := range a.Issuer.keys.Load().public {
		if err = token.Claims(key, &public, &own); err == nil {
			break
		}
	}
	if err != nil {
		return nil, false, fmt.Errorf("the token is not signed by this cluster: %w", err)
	}
	now := a.Now()
	if public.Expiry == nil {
		return nil, false, errors.New("the token never expires; request another one")
	}
	err = public.ValidateWithLeeway(jwt.Expected{Issuer: a.Issuer.Name, Time: now}, clockSkew)
	if err == nil && now.After(public.Expiry.Time()) { // the end has no leeway
		err = jwt.ErrExpired
	}
	if err != nil {
		return nil, false, fmt.Errorf("service account token: %w", err)
	}
	wanted, ok := authenticator.AudiencesFrom(ctx)
	if !ok {
		wanted = a.Issuer.Audiences
	}
	audiences := wanted.Intersect(authenticator.Audiences(public.Audience))
	if len(audiences) == 0 {
		return nil, false, fmt.Errorf("token audiences %q is invalid for the target audiences %q", public.Audience, wanted)
	}
	u, err := a.check(ctx, public.Subject, own.Kubernetes, public.ID)
	if err != nil {
		return nil, false, err
	}
	return &authenticator.Response{User: u, Audiences: audiences}, true, nil
}

// mine reports whether a token names this issuer, without verifying it.
func (a *Authenticator) mine(text string) bool {
	parts := strings.Split(text, ".")
	if len(parts) != 3 {
		return false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return false
	}
	var c struct {
		Issuer string `json:"iss"`
	}
	return json.Unmarshal(payload, &c) == nil && c.Issuer == a.Issuer.Name
}

// check verifies that the account and the object that the token is bound to exist
// and have the UIDs in the token.
func (a *Authenticator) check(ctx context.Context, subject string, b serviceaccount.Bound, id string) (user.Info, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	if b.ServiceAccount == nil || subject != apiserviceaccount.MakeUsername(b.Namespace, b.ServiceAccount.Name) {
		return nil, errors.New("the token's subject and its account differ")
	}
	account, err := a.account(ctx, b)
	if err != nil {
		return nil, err
	}
	info := &apiserviceaccount.ServiceAccountInfo{Namespace: account.Namespace, Name: account.Name, UID: string(account.UID)}
	if id != "" {
		info.CredentialID = "JTI=" + id
	}
	if b.Pod != nil {
		uid, deleted := a.Pods(b.Namespace, b.Pod.Name)
		if uid != b.Pod.UID {
			p, err := a.Client.CoreV1().Pods(b.Namespace).Get(ctx, b.Pod.Name, metav1.GetOptions{})
			if err != nil {
				return nil, lookupError("Pod", b.Pod, err)
			}
			uid, deleted = string(p.UID), p.DeletionTimestamp
		}
		if err := a.same("Pod", b.Pod, uid, deleted); err != nil {
			return nil, err
		}
		info.PodName, info.PodUID = b.Pod.Name, b.Pod.UID
	}
	if b.Secret != nil {
		s, err := a.Client.CoreV1().Secrets(b.Namespace).Get(ctx, b.Secret.Name, metav1.GetOptions{})
		if err != nil {
			return nil, lookupError("Secret", b.Secret, err)
		}
		if err := a.same("Secret", b.Secret, string(s.UID), s.DeletionTimestamp); err != nil {
			return nil, err
		}
	}
	if b.Node != nil {
		// With a Pod the Node is where it runs; without a Pod the token is bound
		// to.
		if b.Pod == nil {
			n, err := a.Client.CoreV1().Nodes().Get(ctx, b.Node.Name, metav1.GetOptions{})
			if err != nil {
				return nil, lookupError("Node", b.Node, err)
			}
			if err := a.same("Node", b.Node, string(n.UID), n.DeletionTimestamp); err != nil {
				return nil, err
			}
		}
		info.NodeName, info.NodeUID = b.Node.Name, b.Node.UID
	}
	return info.UserInfo(), nil
}

func (a *Authenticator) account(ctx context.Context, b serviceaccount.Bound) (*corev1.ServiceAccount, error) {
	account, err := a.Accounts.ServiceAccounts(b.Namespace).Get(b.ServiceAccount.Name)
	if err != nil || string(account.UID) != b.ServiceAccount.UID {
		account, err = a.Client.CoreV1().ServiceAccounts(b.Namespace).Get(ctx, b.ServiceAccount.Name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, lookupError("ServiceAccount", b.ServiceAccount, err)
	}
	return account, a.same("ServiceAccount", b.ServiceAccount, string(account.UID), account.DeletionTimestamp)
}

func (a *Authenticator) same(kind string, r *serviceaccount.Ref, uid string, deleted *metav1.Time) error {
	if uid != r.UID {
		return fmt.Errorf("the token is of an earlier %s %s, which has been deleted", kind, r.Name)
	}
	if deleted != nil && a.Now().After(deleted.Add(deletionLeeway)) {
		return fmt.Errorf("the token's %s %s has been deleted", kind, r.Name)
	}
	return nil
}

func lookupError(kind string, r *serviceaccount.Ref, err error) error {
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the token's %s %s does not exist", kind, r.Name)
	}
	return fmt.Errorf("cannot look up the token's %s %s: %w", kind, r.Name, err)
}
