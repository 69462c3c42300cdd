package join

import (
	"errors"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A join token is valid while its Secret exists, of kubeadm's form
// (https://kubernetes.io/docs/reference/access-authn-authz/bootstrap-tokens), and
// until its expiration.
const (
	SecretType      = corev1.SecretType("bootstrap.kubernetes.io/token")
	SecretNamespace = metav1.NamespaceSystem
	secretPrefix    = "bootstrap-token-"

	// UsageJoin and UsageApproval are the keys that are "true" in the Secret of a token: kubeadm's for
	// one whose requests the server approves, and that of one whose requests an administrator approves.
	// No earlier version accepts the latter.
	UsageJoin     = "usage-bootstrap-authentication"
	UsageApproval = "usage-fairlead-approval"

	// DefaultLife is how long a token is valid unless another end is asked for.
	DefaultLife = 24 * time.Hour
)

// SecretName returns the name of the Secret of the token with an ID.
func SecretName(id string) string { return secretPrefix + id }

// Object returns the Secret by which servers know the token until end; the zero time
// means forever.
func (t Token) Object(end time.Time, description string) *corev1.Secret {
	usage := UsageJoin
	if t.Approval {
		usage = UsageApproval
	}
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: SecretNamespace, Name: SecretName(t.ID)},
		Type:       SecretType,
		StringData: map[string]string{
			"token-id": t.ID, "token-secret": t.Secret, "description": description, usage: "true",
		},
	}
	if !end.IsZero() {
		s.StringData["expiration"] = end.UTC().Format(time.RFC3339)
	}
	return s
}

// Listed is what may be shown of a token.
type Listed struct {
	ID, Description string
	// Approval is that of Token.
	Approval bool
	// End is the zero time for a token that does not expire.
	End time.Time
}

// List reads a Secret. The error is that of a Secret that is no token.
func List(s *corev1.Secret) (Listed, error) {
	id, ok := strings.CutPrefix(s.Name, secretPrefix)
	if !ok || s.Type != SecretType || string(s.Data["token-id"]) != id {
		return Listed{}, errors.New("the Secret is no token")
	}
	l := Listed{ID: id, Description: string(s.Data["description"]), Approval: string(s.Data[UsageApproval]) == "true"}
	var err error
	if text := string(s.Data["expiration"]); text != "" {
		l.End, err = time.Parse(time.RFC3339, text)
	}
	return l, err
}

// Expired reports whether the token is no longer valid.
func (l Listed) Expired(now time.Time) bool { return !l.End.IsZero() && !now.Before(l.End) }
