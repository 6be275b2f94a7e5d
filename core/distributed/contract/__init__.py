"""What each parameter's gradient needs: tags on parameters in, one frozen contract out."""
