package access

import (
	"context"
	"crypto/subtle"
	"fmt"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// bootstrapTokens authenticates tokens ID.SECRET by the Secret
// kube-system/bootstrap-token-ID.
type bootstrapTokens struct {
	client kubernetes.Interface
	now    func() time.Time
}

const (
	bootstrapUserPrefix  = "system:bootstrap:"
	bootstrapGroupPrefix = "system:bootstrappers:"
	bootstrapTimeout     = 10 * time.Second
)

// Forms of a token and of the groups that it may grant.
var (
	bootstrapTokenForm = regexp.MustCompile(`^([a-z0-9]{6})\.([a-z0-9]{16})$`)
	bootstrapGroupForm = regexp.MustCompile(`^system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]$`)
)

// AuthenticateToken has no opinion of tokens of another form.
func (b bootstrapTokens) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	parts := bootstrapTokenForm.FindStringSubmatch(token)
	if parts == nil {
		return nil, false, nil
	}
	s, err := b.secret(ctx, parts[1], parts[2], join.UsageJoin)
	if s == nil || err != nil {
		return nil, false, err
	}
	groups := []string{GroupBootstrappers}
	if text := string(s.Data["auth-extra-groups"]); text != "" {
		for g := range strings.SplitSeq(text, ",") {
			if !bootstrapGroupForm.MatchString(g) {
				return nil, false, fmt.Errorf("bootstrap token %s: %q is not a group it may grant: want %sNAME", parts[1], g, bootstrapGroupPrefix)
			}
			groups = append(groups, g)
		}
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: bootstrapUserPrefix + parts[1], Groups: groups}}, true, nil
}

// secret returns the Secret of the token of an ID and a secret, nil if there is none that is valid for usage.
func (b bootstrapTokens) secret(ctx context.Context, id, secret, usage string) (*corev1.Secret, error) {
	ctx, cancel := context.WithTimeout(ctx, bootstrapTimeout)
	defer cancel()
	s, err := b.client.CoreV1().Secrets(join.SecretNamespace).Get(ctx, join.SecretName(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no token
	}
	if err != nil {
		return nil, err
	}
	value := func(key string) string { return string(s.Data[key]) }
	if s.DeletionTimestamp != nil || s.Type != join.SecretType || value("token-id") != id ||
		subtle.ConstantTimeCompare(s.Data["token-secret"], []byte(secret)) != 1 || value(usage) != "true" {
		return nil, nil //nolint:nilnil // likewise
	}
	if text := value("expiration"); text != "" {
		end, err := time.Parse(time.RFC3339, text)
		if err != nil || !b.now().Before(end) {
			return nil, nil //nolint:nilerr,nilnil // an unreadable expiration counts as past
		}
	}
	return s, nil
}
