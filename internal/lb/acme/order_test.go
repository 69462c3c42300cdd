package acme

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/crypto/acme"
)

// What an authority says is repeated within bounds, in whole characters.
func TestShorten(t *testing.T) {
	for _, text := range []string{
		"short\n", strings.Repeat("x", maxError), "x" + strings.Repeat("ü", maxError), strings.Repeat("€", maxError),
	} {
		got := shorten(errors.New(text))
		if !utf8.ValidString(got) || len(got) > maxError || len(got) < min(len(text), maxError-utf8.UTFMax) || strings.ContainsAny(got, "\n") {
			t.Errorf("%q of %d bytes became %q of %d", text, len(text), got, len(got))
		}
	}
}

// An account that the authority knows no more is registered again, once; other answers leave it.
func TestRejectedAccounts(t *testing.T) {
	for _, c := range []struct {
		err    error
		forget bool
	}{
		{&acme.Error{StatusCode: http.StatusBadRequest, ProblemType: "urn:ietf:params:acme:error:accountDoesNotExist"}, true},
		{&acme.Error{StatusCode: http.StatusUnauthorized, ProblemType: "urn:ietf:params:acme:error:unauthorized"}, true},
		{&acme.Error{StatusCode: http.StatusTooManyRequests, ProblemType: "urn:ietf:params:acme:error:rateLimited"}, false},
		{errors.New("no route to host"), false},
	} {
		used := &acme.Client{}
		a := &authority{client: used}
		if a.rejected(used, c.err); (a.client == nil) != c.forget {
			t.Errorf("after %v the client is %v", c.err, a.client)
		}
		fresh := &acme.Client{}
		a.client = fresh
		if a.rejected(used, c.err); a.client != fresh {
			t.Errorf("after %v of an earlier client the present one is forgotten", c.err)
		}
	}
}
